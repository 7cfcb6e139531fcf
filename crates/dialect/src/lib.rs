//! The formats in which model families write reasoning, text and tool calls.
//!
//! [`Dialect`] selects the family of a model. The description of a family yields both a [`Parser`],
//! which splits an answer into [`Parts`] token by token, and a grammar, which restricts the model
//! to valid calls.
//!
//! ```
//! use std::sync::Arc;
//!
//! use forebay_dialect::{Choice, Dialect, Evidence, Parser, Part, Parts, Reading, Tools};
//! use serde_json::json;
//!
//! let evidence = Evidence { template: "", has_token: &|_| false };
//! let dialect = Dialect::new(&Choice::Named("hermes".into()), &Choice::None, evidence)?;
//! let tools = Arc::new(Tools::new([("ping".to_owned(), json!({"type": "object"}))]));
//! let mut parser = Parser::new(Reading { dialect, tools, ..Reading::default() });
//!
//! let mut parts = Parts::default();
//! let said = ["I look. <tool", "_call>{\"name\": \"ping\", \"argu", "ments\": {}}</tool_call>"];
//! for text in said {
//!     parser.push(text, &mut parts);
//! }
//! parser.finish(true, &mut parts);
//! assert!(parts.iter().any(|part| matches!(part, Part::Call { name: "ping", .. })));
//! assert_eq!(parser.complete_calls(), 1);
//! # Ok::<(), forebay_dialect::UnknownName>(())
//! ```

mod family;
mod finder;
mod grammar;
mod names;
mod parser;
mod parts;
mod python;
mod scan;
mod schema;

pub use family::Ids;
pub use grammar::{
    ArgumentStyle, ArgumentTags, CONTENT, CallGrammar, Instead, Marks, text_without,
};
pub use names::{Choice, Dialect, Evidence, UnknownName};
pub use parser::{Parser, Place, Reading, Start};
pub use parts::{Part, Parts};
pub use schema::Tools;
