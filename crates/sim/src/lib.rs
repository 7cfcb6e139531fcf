//! forebay-sim
