//! Flags about how the model writes.

use clap::Args;

#[derive(Debug, Args)]
#[command(next_help_heading = "Tools and reasoning")]
pub(crate) struct DialectFlags {
    /// The dialect of tool calls, in vLLM's or SGLang's words: hermes, qwen3_coder, llama3_json,
    /// pythonic, mistral, deepseek_v3, glm45, kimi_k2, openai, and others. `none`: calls are text
    /// [default: found by its chat template and vocabulary].
    #[arg(long, value_name = "NAME")]
    pub(crate) tool_call_parser: Option<String>,
    /// The dialect of reasoning, in the same words (qwen3, deepseek_r1, mistral, openai_gptoss,
    /// ...); `none`: it is text [default: found likewise].
    #[arg(long, value_name = "NAME")]
    pub(crate) reasoning_parser: Option<String>,
    /// For those used to vLLM, and always on: the model calls tools as it sees fit where a request
    /// offers some.
    #[arg(long)]
    pub(crate) enable_auto_tool_choice: bool,
}
