//! forebay-scheduler
