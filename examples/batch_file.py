"""Answers a file of requests with `forebay run-batch`. If it is killed, the same command continues where it stopped.

python batch_file.py [MODEL]
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

QUESTIONS = {"norway": "What is the capital of Norway?", "colour": "Name a colour."}


def main() -> None:
    """Prints each question's name with its answer."""
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    with tempfile.TemporaryDirectory() as folder:
        requests, answers = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
        with requests.open("w") as file:
            for name, question in QUESTIONS.items():
                body = {"messages": [{"role": "user", "content": question}], "max_tokens": 16, "temperature": 0}
                line = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
                file.write(json.dumps(line) + "\n")
        command = [sys.executable, "-m", "forebay", "run-batch", "-i", str(requests), "-o", str(answers)]
        subprocess.run([*command, "--model", model, "--", "--max-model-len", "1024"], check=True)
        # Answers are in the order in which they were finished.
        found = {answer["custom_id"]: answer for answer in map(json.loads, answers.open())}
        for name in QUESTIONS:
            print(f"{name}: {found[name]['response']['body']['choices'][0]['message']['content']!r}")


if __name__ == "__main__":
    main()
