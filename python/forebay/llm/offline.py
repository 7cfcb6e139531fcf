"""`LLM`: batches of prompts, whose results are returned together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from forebay.llm.calls import Calls, Messages
from forebay.llm.client import Call, Client
from forebay.llm.engine import Background, BorrowedServer, failures, name_tokens, wait_until_ready
from forebay.llm.errors import RequestError
from forebay.llm.flags import command_line
from forebay.llm.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from forebay.llm.params import PoolingParams, Prompt, SamplingParams, one_each, prompt_list, to_json
from forebay.llm.progress import bar
from forebay.llm.server import Server
from forebay.llm.weights import get_parameter, pause, resume, update_weights

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LLM", "chat_fields"]

T = TypeVar("T")
Show = bool | Callable[..., Any]
"""True shows a progress bar, if `tqdm` is installed. A class with its interface is used in its place."""


class LLM:
    """A model, for batches of any size.

    Starts a server for the model and waits until it is ready. The server is stopped when this object is collected, at
    the end of a `with` block, or when the interpreter exits. `flags` are those of `forebay serve`: `max_model_len=2048`
    is `--max-model-len 2048`. docs/cli.md lists them.

    >>> from forebay import LLM, SamplingParams
    >>> llm = LLM("smollm2", max_model_len=512)
    >>> outputs = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=2))
    >>> outputs[0].outputs[0].text
    ' Paris.'
    >>> llm.close()

    A forked or spawned process may use its parent's object: it shares the parent's server.

    Raises:
        StartError: the server did not start; the message is the reason.
        ValueError: a flag is about the server's socket.
    """

    def __init__(self, model: str | os.PathLike[str], **flags: Any) -> None:
        self.model = os.fspath(model)
        self._texts: dict[int, str] = {}
        self._calls = Calls()
        server = Server([f"--model-path={self.model}", *command_line(flags)])
        self._server: Server | BorrowedServer = server
        self._background = Background(server)
        try:
            self._facts = self._background.run(lambda: wait_until_ready(server, self.model))
        except BaseException:
            server.stop()
            raise
        self._background.use(self._facts)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Show = True,
        *,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continues prompts. The results are in the order of the prompts.

        >>> from forebay import SamplingParams, StructuredOutputsParams
        >>> params = SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
        >>> [output.outputs[0].text in ("yes", "no") for output in llm.generate(["Is snow cold?"], params)]
        [True]

        Args:
            prompts: texts, lists of token ids, or objects that contain either.
            sampling_params: for all prompts, or a list with one entry per prompt. None: the model's defaults.
            use_tqdm: whether a progress bar is shown.
            priority: for all prompts, or a list with one entry per prompt. With `schedule_policy="priority"`,
                larger values run sooner.

        Raises:
            RequestError: a request failed. The results of the other requests are in the error's `outputs`.
            EngineDeadError: the server exited.
        """
        found = prompt_list(prompts)
        params = one_each("sampling_params", self._sampling(sampling_params), len(found))
        priorities = one_each("priority", priority or 0, len(found))
        calls = [self._calls.completion(*each) for each in zip(found, params, priorities, strict=True)]
        return self._generated(calls, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Show = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Continues a conversation, or each of a list of conversations.

        Images are parts of messages, as in OpenAI's API. Tool calls and reasoning are separate from the text, in
        `tool_calls` and `reasoning`. `extra_args` of the parameters may have `tool_choice` and other fields.

        >>> from forebay import SamplingParams
        >>> question = [{"role": "user", "content": "What is the capital of Norway?"}]
        >>> llm.chat(question, SamplingParams(temperature=0, max_tokens=6))[0].outputs[0].text
        'The capital of Norway is Oslo'

        Raises:
            RequestError: a request failed. The results of the other requests are in the error's `outputs`.
            EngineDeadError: the server exited.
        """
        one = len(messages) > 0 and isinstance(messages[0], Mapping)
        found: Any = [messages] if one else messages
        more = chat_fields(tools, add_generation_prompt, continue_final_message, chat_template_kwargs)
        params = one_each("sampling_params", self._sampling(sampling_params), len(found))
        calls = [self._calls.chat(*each, more) for each in zip(found, params, strict=True)]
        return self._generated(calls, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: Show = True,
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Returns embeddings of texts, with an embedding model.

        >>> outputs = embedder.embed(["rain", "snow"])
        >>> [output.outputs.hidden_size for output in outputs]
        [384, 384]

        Raises:
            RequestError: a request failed. The results of the other requests are in the error's `outputs`.
            EngineDeadError: the server exited.
        """
        return self._all([self._calls.embedding(*each) for each in _pooled(prompts, pooling_params)], use_tqdm)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: Show = True,
        *,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput]:
        """Returns the outputs of a pooling model: vectors, or scores. The model has to support `pooling_task`.

        Raises:
            RequestError: a request failed. The results of the other requests are in the error's `outputs`.
            EngineDeadError: the server exited.
        """
        calls = [self._calls.pooling(*each, pooling_task) for each in _pooled(prompts, pooling_params)]
        return self._all(calls, use_tqdm)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: Show = True,
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Returns the probabilities of a classifier's labels.

        Raises:
            RequestError: a request failed. The results of the other requests are in the error's `outputs`.
            EngineDeadError: the server exited.
        """
        return self._all([self._calls.classification(*each) for each in _pooled(prompts, pooling_params)], use_tqdm)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        use_tqdm: Show = True,
        *,
        pooling_params: PoolingParams | None = None,
    ) -> list[ScoringRequestOutput]:
        """Scores pairs of texts: one text with each of several, or two lists, entry by entry.

        >>> close, far = embedder.score("How is the weather?", ["It rains.", "A whale is a mammal."])
        >>> close.outputs.score > far.outputs.score
        True

        Raises:
            RequestError: a request failed. The results of the other requests are in the error's `outputs`.
            EngineDeadError: the server exited.
            ValueError: the lists have different lengths.
        """
        seconds = [data_2] if isinstance(data_2, str) else data_2
        pairs = zip(one_each("data_1", data_1, len(seconds)), seconds, strict=True)
        params = pooling_params or PoolingParams()
        return self._all([self._calls.score(pair, params) for pair in pairs], use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the sampling parameters that the model's authors recommend."""
        return self._facts.sampling()

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text.

        >>> llm.detokenize(llm.tokenize("Hello"))
        'Hello'
        """
        body = to_json({"prompt": text, "add_special_tokens": add_special_tokens})
        tokens: list[int] = self._background.ask(lambda client: client.ask("POST", "/tokenize", body))["tokens"]
        return tokens

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Returns the text of token ids."""
        body = to_json({"tokens": list(token_ids)})
        text: str = self._background.ask(lambda client: client.ask("POST", "/detokenize", body))["text"]
        return text

    def reset_prefix_cache(self) -> None:
        """Drops all cached prompts."""
        self._background.ask(lambda client: client.ask("POST", "/flush_cache"))

    def update_weights(
        self,
        weights: Mapping[str, Tensor] | str | os.PathLike[str],
        *,
        version: str | None = None,
        abort: bool = False,
    ) -> int:
        """Replaces the weights. Returns the number of requests that continue with the new ones.

        docs/weights.md describes the details. If tensors are given, the model must be a safetensors checkpoint.

        Args:
            weights: some or all tensors, by their names in the checkpoint, such as a `state_dict()` of a Transformers
                model. Or a checkpoint of the same shape: a folder, or a GGUF file.
            version: the name of the weights, which `get_weight_version` returns.
            abort: True aborts running requests. Otherwise they continue with the new weights.

        Raises:
            RequestError: the weights can't be loaded. The old weights stay in use.
            EngineDeadError: the server exited.
        """
        return self._background.ask(lambda client: update_weights(client, weights, version, abort))

    def get_weight_version(self) -> str:
        """Returns the name of the weights; `default` until a name is set."""
        version: str = self._background.ask(lambda client: client.ask("GET", "/get_weight_version"))["weight_version"]
        return version

    def get_parameter(self, name: str, rows: int = 100) -> Any:
        """Returns the first rows of a parameter as lists of numbers, or the first values of a vector.

        Raises:
            RequestError: there is no such parameter, or it is not stored as plain floats.
        """
        return self._background.ask(lambda client: get_parameter(client, name, rows))

    def pause(self, mode: str = "keep") -> int:
        """Stops computation until `resume`; new requests wait. Returns the number of requests that will continue later.

        >>> llm.pause()
        0
        >>> llm.resume()

        Args:
            mode: `keep`: running requests stop and continue later. `abort`: they are aborted. `wait`: they finish.
        """
        return self._background.ask(lambda client: pause(client, mode))

    def resume(self) -> None:
        """Continues after `pause`."""
        self._background.ask(resume)

    def close(self) -> None:
        """Stops the server. Requests of other threads fail."""
        self._background.close()
        self._server.stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "facts": self._facts, "socket": self._server.socket}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.model = state["model"]
        self._facts = state["facts"]
        self._texts, self._calls = {}, Calls()
        self._server = BorrowedServer(state["socket"])
        self._background = Background(self._server)
        self._background.use(self._facts)

    def _sampling(self, given: SamplingParams | Sequence[SamplingParams] | None) -> Any:
        return self._facts.sampling() if given is None else given

    def _generated(self, calls: Sequence[Call[RequestOutput]], use_tqdm: Show) -> list[RequestOutput]:
        async def named(client: Client, outputs: list[RequestOutput]) -> None:
            await name_tokens(client, outputs, self._texts)

        return self._all(calls, use_tqdm, named)

    def _all(
        self,
        calls: Sequence[Call[T]],
        use_tqdm: Show,
        complete: Callable[[Client, list[T]], Any] | None = None,
    ) -> list[T]:
        """Returns the results of calls. `complete` is awaited with all results."""
        ended: SimpleQueue[int | None] = SimpleQueue()

        async def work() -> list[T]:
            client = self._background.client()
            results = await client.every(calls, ended.put)
            if complete is not None:
                await complete(client, results)
            return results

        future = self._background.submit(work)
        future.add_done_callback(lambda _: ended.put(None))
        try:
            with bar(use_tqdm, len(calls), "Processed prompts") as shown:
                while ended.get() is not None:
                    if shown is not None:
                        shown.update(1)
            outputs = future.result()
        except BaseException:
            future.cancel()
            raise
        if errors := failures(outputs):
            raise RequestError.of_batch(errors, len(outputs), outputs)
        return outputs


def chat_fields(
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Returns the API fields for those arguments of `chat` that differ from the defaults."""
    found: dict[str, Any] = {} if add_generation_prompt else {"add_generation_prompt": False}
    if continue_final_message:
        found["continue_final_message"] = True
    if tools:
        found["tools"] = list(tools)
    if chat_template_kwargs:
        found["chat_template_kwargs"] = dict(chat_template_kwargs)
    return found


def _pooled(
    prompts: Prompt | Sequence[Prompt], params: PoolingParams | Sequence[PoolingParams] | None
) -> list[tuple[Prompt, PoolingParams]]:
    """Pairs each prompt with its parameters."""
    found = prompt_list(prompts)
    each = one_each("pooling_params", params or PoolingParams(), len(found))
    return list(zip(found, each, strict=True))
