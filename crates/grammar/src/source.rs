//! The requested form of an answer.

use std::sync::Arc;

use forebay_dialect::{ArgumentStyle, Marks};

/// The largest number of bytes of a schema or a structural tag.
pub const SCHEMA_BYTES: usize = 2 << 20;
/// The largest number of bytes of a grammar, or of all choices together.
pub const GRAMMAR_BYTES: usize = 256 << 10;
/// The largest size of a regular expression in bytes. Compiled, it takes some hundred times as
/// much.
pub const REGEX_BYTES: usize = 32 << 10;
/// The deepest nesting of a schema or a structural tag.
pub const SCHEMA_DEPTH: usize = 64;
/// The largest number of JSON values of a schema or a structural tag.
pub const SCHEMA_VALUES: usize = 1 << 16;
/// The largest number of choices.
pub const CHOICES: usize = 16_384;

/// A complete form of an answer. Equal sources are compiled once.
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

/// Tool calls: a dialect's grammar, and the parts that the request adds.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CallForm {
    /// The grammar, without the rules of arguments and of [`forebay_dialect::CONTENT`].
    pub lark: Arc<str>,
    /// The style in which the dialect writes arguments.
    pub style: ArgumentStyle,
    /// Special tokens that are marks of the dialect.
    pub marks: Arc<Marks>,
    /// The arguments of each tool.
    pub arguments: Vec<CallArguments>,
    /// What may be written instead of calls, and the parameter that requires it, for errors.
    pub content: Option<(Arc<str>, Form)>,
}

/// The arguments of a tool.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CallArguments {
    /// The name of the rule.
    pub rule: String,
    /// The JSON schema of the arguments, as text.
    pub schema: Arc<str>,
    /// The schema's path in the request, which errors name.
    pub path: Arc<str>,
    /// True if a keyword that can't be enforced is an error. Otherwise it is ignored and reported.
    pub strict: bool,
    /// The form of the arguments, if they are a text; the schema is then ignored.
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

/// White space between JSON tokens. Without a bound, some models fill the whole answer with it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub enum Whitespace {
    /// At each place, one space or a line end with at most 24 blanks of indentation.
    #[default]
    Bounded,
    /// There is no white space.
    None,
    /// At each place, one match of this regular expression.
    Pattern(Arc<str>),
}

impl Whitespace {
    /// The white space as a regular expression; `None`: there is none.
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
    /// True if the form allows no text at all, or has no alternative.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        match self {
            Form::JsonObject | Form::Calls(_) => false,
            // Blanks may be an answer.
            Form::Regex(text) => text.is_empty(),
            Form::JsonSchema(text)
            | Form::Lark(text)
            | Form::Ebnf(text)
            | Form::StructuralTag(text) => text.trim().is_empty(),
            Form::Choice(choices) => choices.is_empty(),
        }
    }

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
    /// The number of bytes of the text.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.form.bytes()
    }

    /// The number of bytes of all texts in it.
    pub(crate) fn size(&self) -> usize {
        self.bytes() + self.whitespace.pattern().map_or(0, str::len)
    }

    /// The largest number of bytes of such a source.
    #[must_use]
    pub fn limit(&self) -> usize {
        match &self.form {
            Form::JsonObject => 0,
            Form::JsonSchema(_) | Form::StructuralTag(_) | Form::Calls(_) => SCHEMA_BYTES,
            Form::Regex(_) => REGEX_BYTES,
            Form::Lark(_) | Form::Ebnf(_) | Form::Choice(_) => GRAMMAR_BYTES,
        }
    }

    /// A grammar in the clients' notations: GBNF if it has a rule with `::=`, else Lark.
    #[must_use]
    pub fn grammar(text: &str) -> Self {
        let form = if text.contains("::=") { Form::Ebnf } else { Form::Lark };
        form(text.into()).into()
    }
}
