//! Flags about the format of tool calls and reasoning.

use clap::Args;

#[derive(Debug, Args)]
#[command(next_help_heading = "Tools and reasoning")]
pub(crate) struct DialectFlags {
    /// Format of tool calls, by vLLM's or SGLang's name: hermes, qwen3_coder, llama3_json,
    /// pythonic, mistral, deepseek_v3, glm45, kimi_k2, openai, and others. `none`: calls are plain
    /// text [default: detected from the chat template and vocabulary].
    #[arg(long, value_name = "NAME")]
    pub(crate) tool_call_parser: Option<String>,
    /// Format of reasoning, by the same names (qwen3, deepseek_r1, mistral, openai_gptoss, ...);
    /// `none`: reasoning is plain text [default: detected in the same way].
    #[arg(long, value_name = "NAME")]
    pub(crate) reasoning_parser: Option<String>,
    /// Accepted for vLLM without effect: the model may always call the tools of a request.
    #[arg(long)]
    pub(crate) enable_auto_tool_choice: bool,
}
