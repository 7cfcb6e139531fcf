"""Prints two answers at the same time, while they are generated.

python streaming.py [MODEL]
"""

import asyncio
import sys

from forebay import AsyncLLM, RequestOutputKind, SamplingParams

QUESTIONS = ["Why is the sky blue?", "Why is grass green?"]


async def answer(llm: AsyncLLM, number: int) -> None:
    """Prints the chunks of an answer, each with the answer's number."""
    params = SamplingParams(temperature=0, max_tokens=24, output_kind=RequestOutputKind.DELTA)
    async for output in llm.chat([{"role": "user", "content": QUESTIONS[number]}], params):
        print(number, repr(output.outputs[0].text) if output.outputs else "", flush=True)
        if output.finished:
            print(number, "finished:", output.outputs[0].finish_reason)


async def main() -> None:
    """Starts a server, and sends it both questions."""
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    async with AsyncLLM(model, max_model_len=1024) as llm:
        await asyncio.gather(*(answer(llm, number) for number in range(len(QUESTIONS))))


if __name__ == "__main__":
    asyncio.run(main())
