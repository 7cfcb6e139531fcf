"""Asks a question about an image, which is created here and sent as part of the conversation.

python images.py MODEL

The model has to support images, such as Qwen/Qwen3-VL-2B-Instruct.
"""

import base64
import struct
import sys
import zlib

from forebay import LLM, SamplingParams


def png(width: int, height: int, colour: tuple[int, int, int]) -> bytes:
    """Returns a PNG file with an image of a single colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = (b"\0" + bytes(colour) * width) * height
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def main() -> None:
    """Prints the model's answers about a red and a blue image."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    conversations = []
    for colour in [(255, 0, 0), (0, 0, 255)]:
        url = "data:image/png;base64," + base64.b64encode(png(64, 64, colour)).decode()
        image = {"type": "image_url", "image_url": {"url": url}}
        question = {"type": "text", "text": "Which colour is this?"}
        conversations.append([{"role": "user", "content": [image, question]}])
    with LLM(sys.argv[1]) as llm:
        for output in llm.chat(conversations, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False):
            tokens = len(output.prompt_token_ids or [])
            print(f"{tokens} tokens of prompt -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
