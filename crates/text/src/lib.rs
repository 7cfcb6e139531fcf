//! forebay-text
