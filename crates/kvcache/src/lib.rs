//! forebay-kvcache
