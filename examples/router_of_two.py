"""Starts two servers and a router in front of them, and sends the router a few chats.

python router_of_two.py [MODEL]

Any client of OpenAI's API can be used; this example uses only the standard library.
"""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from typing import Any
from urllib.error import URLError

FOREBAY = [sys.executable, "-m", "forebay"]


def free_port() -> int:
    """Returns a port that no process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def start(stack: ExitStack, *arguments: str) -> str:
    """Runs a command of `forebay` until `stack` is closed. Returns its URL when it is ready."""
    port = free_port()
    process = subprocess.Popen([*FOREBAY, *arguments, "--port", str(port)], stdout=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    url = f"http://127.0.0.1:{port}"
    while True:
        if process.poll() is not None:
            sys.exit(f"{arguments[0]} ended with status {process.returncode}")
        try:
            urllib.request.urlopen(f"{url}/health").close()
        except (URLError, ConnectionError):
            time.sleep(0.05)
        else:
            return url


def chat(url: str, text: str) -> Any:
    """Sends a message. Returns the response."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 12, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def main() -> None:
    """Prints four answers, and the number of answers by each server."""
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    with ExitStack() as stack:
        servers = [start(stack, "serve", model, "--max-model-len", "1024") for _ in range(2)]
        router = start(stack, "route", "--backends", ",".join(servers), "--policy", "round_robin")
        for number in range(4):
            answer = chat(router, f"Count from {number}.")
            print(f"{number}: {answer['choices'][0]['message']['content']!r}")
        for server in servers:
            with urllib.request.urlopen(f"{server}/server_info") as response:
                states = json.load(response)["internal_states"]
            print(f"{server} answered {sum(state['dispatched'] for state in states)} requests")


if __name__ == "__main__":
    main()
