//! The form that a client requests for an answer.

use std::sync::Arc;

use forebay_dialect::{ArgumentStyle, Marks};

/// The largest size of a schema or a structural tag in bytes.
pub const SCHEMA_BYTES: usize = 2 << 20;
/// The largest size of a grammar in bytes, or of all choices together.
pub const GRAMMAR_BYTES: usize = 256 << 10;
/// The largest size of a regular expression in bytes. The compiled form is hundreds of times
/// larger.
pub const REGEX_BYTES: usize = 32 << 10;
/// The deepest nesting of a schema or a structural tag.
pub const SCHEMA_DEPTH: usize = 64;
/// The largest number of JSON values of a schema or a structural tag.
pub const SCHEMA_VALUES: usize = 1 << 16;
/// The largest number of choices.
pub const CHOICES: usize = 16_384;

/// A form with all its options. Requests with equal sources share the compiled form.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Source {
    /// The form.
    pub form: Form,
    /// The white space between the tokens of JSON.
    pub whitespace: Whitespace,
}

/// The kinds of forms.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Form {
    /// A JSON object.
    JsonObject,
    /// JSON that is valid by this schema, which is given as JSON text.
    JsonSchema(Arc<str>),
    /// Text that matches this regular expression as a whole.
    Regex(Arc<str>),
    /// One of these texts.
    Choice(Arc<[String]>),
    /// A grammar in llguidance's dialect of Lark.
    Lark(Arc<str>),
    /// A grammar in GBNF: rules of the form `name ::= ...`, beginning with `root`.
    Ebnf(Arc<str>),
    /// Text in which parts have given forms: a structural tag of vLLM and `SGLang`, given as JSON
    /// text.
    StructuralTag(Arc<str>),
    /// Tool calls, in the format of the model.
    Calls(Arc<CallForm>),
}

/// The form of tool calls: a dialect's grammar, and the parts that the request adds.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CallForm {
    /// The grammar, without the rules of the arguments and of [`forebay_dialect::CONTENT`].
    pub lark: Arc<str>,
    /// How the dialect writes arguments.
    pub style: ArgumentStyle,
    /// The special tokens that are marks of the dialect.
    pub marks: Arc<Marks>,
    /// The arguments of each tool.
    pub arguments: Vec<CallArguments>,
    /// The request parameter that requires a form for output without calls (for errors), and that
    /// form. `None` if calls are required.
    pub content: Option<(Arc<str>, Form)>,
}

/// The arguments of a tool.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CallArguments {
    /// The name of the rule for the arguments.
    pub rule: String,
    /// The JSON schema of the arguments, as text.
    pub schema: Arc<str>,
    /// The path of the schema in the request, for errors.
    pub path: Arc<str>,
    /// True if a keyword that cannot be enforced is an error. Otherwise it is ignored and reported.
    pub strict: bool,
    /// The form of the arguments of a custom tool, which are a single text. The schema is then
    /// ignored.
    pub text: Option<CallText>,
}

/// The only argument of a tool that takes a text.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CallText {
    /// The name of the argument.
    pub name: Arc<str>,
    /// The form of the text: [`Form::Lark`] or [`Form::Regex`].
    pub form: Form,
    /// The path of the form in the request, for errors.
    pub path: Arc<str>,
}

/// The white space between JSON tokens. If it is not bounded, some models fill the whole answer
/// with it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub enum Whitespace {
    /// In each gap, one space, or a line end with at most 24 characters of indentation.
    #[default]
    Bounded,
    /// No white space.
    None,
    /// In each gap, one match of this regular expression.
    Pattern(Arc<str>),
}

impl Whitespace {
    /// Returns the white space as a regular expression; `None` if there is none.
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
    /// True if the form has no content: an empty text, or no choices.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        match self {
            Form::JsonObject | Form::Calls(_) => false,
            // Spaces alone may be an answer.
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
    /// Returns the size of the form's text in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.form.bytes()
    }

    /// Returns the size of all texts of the source in bytes.
    pub(crate) fn size(&self) -> usize {
        self.bytes() + self.whitespace.pattern().map_or(0, str::len)
    }

    /// Returns the largest allowed size of such a source in bytes.
    #[must_use]
    pub fn limit(&self) -> usize {
        match &self.form {
            Form::JsonObject => 0,
            Form::JsonSchema(_) | Form::StructuralTag(_) | Form::Calls(_) => SCHEMA_BYTES,
            Form::Regex(_) => REGEX_BYTES,
            Form::Lark(_) | Form::Ebnf(_) | Form::Choice(_) => GRAMMAR_BYTES,
        }
    }

    /// Creates the source of a grammar in a client's notation: GBNF if it contains `::=`, else
    /// Lark.
    #[must_use]
    pub fn grammar(text: &str) -> Self {
        let form = if text.contains("::=") { Form::Ebnf } else { Form::Lark };
        form(text.into()).into()
    }
}
