//! Estimates the memory of a compiled grammar.
//!
//! The parser reports how many states, expressions and table entries its lexer has, but not their
//! sizes. So the number of each is multiplied by a measured size, for every copy.
//! `crates/server/tests/resources/grammars.rs` compares the estimate with real allocations: it is
//! never lower, and rarely more than double.

use std::collections::HashSet;

use llguidance::earley::{CGrammar, Parser};

/// The size of a symbol of the grammar in bytes, without its name.
const SYMBOL: usize = 600;
/// The size in bytes of a position in a rule.
const PLACE: usize = 48;

/// The sizes of a template, and of a matcher that is copied from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Footprint {
    /// The size of the template in bytes.
    pub(crate) kept: usize,
    /// The size in bytes of each copy of the matcher in its initial state.
    pub(crate) copy: usize,
}

impl Footprint {
    /// Estimates the memory of a parser whose source has `text` bytes.
    pub(crate) fn new(parser: &Parser, text: usize) -> Self {
        let lexer = parser.lexer_stats();
        let spec = parser.grammar().lexer_spec();
        let expressions = spec.regex_builder.exprset();
        let nodes = lexer.num_ast_nodes + lexer.num_derived;
        // The sets of each state have one bit per lexeme.
        let states = lexer.num_states * (64 + lexer.num_regexps / 4);
        let tables = lexer.num_bytes + nodes * 10 + states;
        let described = expressions.num_bytes() + expressions.len() * 8 + spec.lexemes.len() * 400;
        let copy = tables + described + text * 4;
        Self { kept: 2 * copy + described + rules(parser.grammar()), copy }
    }
}

/// Returns the size of the rules in bytes. All copies share them.
fn rules(grammar: &CGrammar) -> usize {
    let mut bytes = 0;
    let mut seen = HashSet::from([grammar.start()]);
    let mut rest = vec![grammar.start()];
    while let Some(symbol) = rest.pop() {
        bytes += SYMBOL + grammar.sym_data(symbol).name.len();
        for &rule in grammar.rules_of(symbol) {
            let (places, _, _) = grammar.rule_rhs(rule);
            bytes += PLACE * (places.len() + 1);
            rest.extend(places.iter().copied().filter(|&place| seen.insert(place)));
        }
    }
    bytes
}
