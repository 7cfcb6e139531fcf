//! forebay-server
