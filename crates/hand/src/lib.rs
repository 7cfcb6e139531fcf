//! forebay-hand
