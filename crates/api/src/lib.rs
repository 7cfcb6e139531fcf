//! forebay-api
