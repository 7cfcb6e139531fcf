//! The form that a client asks of an answer.

use std::sync::Arc;

use forebay_dialect::{ArgumentStyle, Marks};

/// Most bytes of a schema or a structural tag.
pub const SCHEMA_BYTES: usize = 2 << 20;
/// Most bytes of a grammar, or of all choices together.
pub const GRAMMAR_BYTES: usize = 256 << 10;
/// Most bytes of a regular expression: compiled, one takes some hundred times as much.
pub const REGEX_BYTES: usize = 32 << 10;
/// Deepest nesting of a schema or a structural tag.
pub const SCHEMA_DEPTH: usize = 64;
/// Most JSON values of a schema or a structural tag.
pub const SCHEMA_VALUES: usize = 1 << 16;
/// Most choices.
pub const CHOICES: usize = 16_384;

/// The form of an answer, with nothing left to look up: equal sources are compiled once.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Source {
    /// The form.
    pub form: Form,
    /// White space between the tokens of JSON.
    pub whitespace: Whitespace,
}

/// A kind of form.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Form {
    /// A JSON object.
    JsonObject,
    /// JSON that is valid by this schema, which is JSON text.
    JsonSchema(Arc<str>),
    /// Text that this regular expression matches as a whole.
    Regex(Arc<str>),
    /// One of these texts.
    Choice(Arc<[String]>),
    /// A grammar in llguidance's dialect of Lark.
    Lark(Arc<str>),
    /// A grammar in GBNF: rules of the form `name ::= ...`, beginning with `root`.
    Ebnf(Arc<str>),
    /// Text with parts of given forms: a structural tag as vLLM and `SGLang` take it, which is JSON
    /// text.
    StructuralTag(Arc<str>),
    /// Calls of tools, as a model writes them.
    Calls(Arc<CallForm>),
}

/// Calls of tools: a dialect's grammar, and what it leaves to be written.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CallForm {
    /// The grammar, without the rules of arguments and of [`forebay_dialect::CONTENT`].
    pub lark: Arc<str>,
    /// The style in which the dialect writes arguments.
    pub style: ArgumentStyle,
    /// Special tokens that are marks of it.
    pub marks: Arc<Marks>,
    /// The arguments of each tool.
    pub arguments: Vec<CallArguments>,
    /// The output that is allowed in place of calls, and the parameter that has asked for it.
    /// Errors name the parameter.
    pub content: Option<(Arc<str>, Form)>,
}

/// The arguments of a tool.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CallArguments {
    /// Name of the rule.
    pub rule: String,
    /// Their JSON schema, as text.
    pub schema: Arc<str>,
    /// The schema's path in the request, which errors name.
    pub path: Arc<str>,
    /// They are one text, of this form, and the schema says nothing.
    pub text: Option<CallText>,
}

/// The only argument of a tool that takes a text.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CallText {
    /// The argument's name.
    pub name: Arc<str>,
    /// The text's form: [`Form::Lark`] or [`Form::Regex`].
    pub form: Form,
    /// The form's path in the request, which errors name.
    pub path: Arc<str>,
}

/// White space between the tokens of JSON. Without a bound models were seen to write it until the
/// answer's length is used up.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub enum Whitespace {
    /// At each place one space, or a line's end and an indentation of at most 24 blanks.
    #[default]
    Bounded,
    /// None.
    None,
    /// White space that this regular expression matches, at most once a place.
    Pattern(Arc<str>),
}

impl Whitespace {
    /// As a regular expression; `None`: there is none.
    pub(crate) fn pattern(&self) -> Option<&str> {
        match self {
            Self::Bounded => Some(r"( |\n(\t{0,6}| {0,24}))"),
            Self::None => None,
            Self::Pattern(pattern) => Some(pattern),
        }
    }
}

impl From<Form> for Source {
    fn from(form: Form) -> Self {
        Self { form, whitespace: Whitespace::default() }
    }
}

impl Form {
    fn bytes(&self) -> usize {
        match self {
            Form::JsonObject => 0,
            Form::JsonSchema(text)
            | Form::Regex(text)
            | Form::Lark(text)
            | Form::Ebnf(text)
            | Form::StructuralTag(text) => text.len(),
            Form::Choice(choices) => choices.iter().map(String::len).sum(),
            Form::Calls(form) => form.bytes(),
        }
    }
}

impl CallForm {
    fn bytes(&self) -> usize {
        let schemas: usize = self.arguments.iter().map(|tool| tool.schema.len()).sum();
        self.lark.len() + schemas + self.content.as_ref().map_or(0, |(_, form)| form.bytes())
    }
}

impl Source {
    /// Bytes of its text.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.form.bytes()
    }

    /// Most bytes that such a source may have.
    #[must_use]
    pub fn limit(&self) -> usize {
        match &self.form {
            Form::JsonObject => 0,
            Form::JsonSchema(_) | Form::StructuralTag(_) | Form::Calls(_) => SCHEMA_BYTES,
            Form::Regex(_) => REGEX_BYTES,
            Form::Lark(_) | Form::Ebnf(_) | Form::Choice(_) => GRAMMAR_BYTES,
        }
    }

    /// A grammar as clients write it: GBNF where it has a rule with `::=`, else Lark.
    #[must_use]
    pub fn grammar(text: &str) -> Self {
        let form = if text.contains("::=") { Form::Ebnf } else { Form::Lark };
        form(text.into()).into()
    }
}
