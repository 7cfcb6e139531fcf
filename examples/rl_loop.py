"""Trains a model on its own answers: REINFORCE, with a Transformers model as the trainer.

    python rl_loop.py [MODEL] [STEPS]

MODEL is a folder of safetensors or a hub id. It needs `pip install torch transformers`. Short words are rewarded.
"""

import sys

import torch
from transformers import AutoModelForCausalLM

from forebay import LLM, RequestOutput, SamplingParams

PROMPTS = ["What is rain?", "What is a river?"]
SAMPLES, TOKENS = 4, 24


def reward(text: str) -> float:
    """Returns the negative mean length of the words."""
    words = text.split()
    return -sum(map(len, words)) / len(words) if words else -20.0


def loss(trainer: torch.nn.Module, output: RequestOutput) -> torch.Tensor:
    """Returns the mean of -advantage * log p over the answers to one prompt. The baseline is their mean reward."""
    rewards = torch.tensor([reward(answer.text) for answer in output.outputs])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    prompt = output.prompt_token_ids or []
    terms = []
    for answer, advantage in zip(output.outputs, advantages, strict=True):
        ids = torch.tensor([prompt + answer.token_ids])
        logits = trainer(ids).logits[0, len(prompt) - 1 : -1]
        chosen = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])
        terms.append(-advantage * chosen.mean())
    return torch.stack(terms).mean()


def main() -> None:
    """Prints the mean reward and the weight version of each step, and an answer before and after training."""
    model = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 10
    trainer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-5)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS)
    with LLM(model, max_model_len=512, dtype="float32") as llm:
        print("before:", llm.chat(chats[0], greedy, use_tqdm=False)[0].outputs[0].text)
        for step in range(1, steps + 1):
            sampling = SamplingParams(n=SAMPLES, max_tokens=TOKENS, seed=step)
            outputs = llm.chat(chats, sampling, use_tqdm=False)
            rewards = [reward(answer.text) for output in outputs for answer in output.outputs]
            optimizer.zero_grad()
            torch.stack([loss(trainer, output) for output in outputs]).mean().backward()
            optimizer.step()
            mean, answered = sum(rewards) / len(rewards), llm.get_weight_version()
            llm.update_weights(trainer.state_dict(), version=f"step {step}")
            print(f"step {step}: mean reward {mean:.2f} by weights {answered!r}")
        print("after:", llm.chat(chats[0], greedy, use_tqdm=False)[0].outputs[0].text)
        print("weights:", llm.get_weight_version())


if __name__ == "__main__":
    main()
