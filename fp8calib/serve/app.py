"""The routes of the server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from fp8calib import __version__
from fp8calib.runtime.async_llm import AsyncLLM
from fp8calib.serve import errors
from fp8calib.serve.chat import chat
from fp8calib.serve.completions import complete
from fp8calib.serve.metrics import registry_of
from fp8calib.serve.middleware import LimitBody, RequireHost, RequireKey
from fp8calib.serve.protocol import (
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    ModelCard,
    ModelList,
)
from fp8calib.serve.served_model import ServedModel
from fp8calib.serve.settings import ServerSettings


def create_app(llm: AsyncLLM, settings: ServerSettings) -> FastAPI:
    """The application that serves `llm`; it shuts `llm` down when it ends itself."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        llm.shutdown()

    # No interactive documentation: its pages load scripts from elsewhere. No telemetry: FastAPI's
    # own would record requests, and send them where environment variables say.
    app = FastAPI(
        title="fp8calib",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    errors.install(app)
    limits = settings.limits
    app.add_middleware(LimitBody, max_bytes=limits.body_bytes, max_seconds=limits.body_seconds)
    if settings.api_key is not None:  # what is added later is asked earlier
        app.add_middleware(RequireKey, key=settings.api_key)
    if settings.hosts is not None:
        app.add_middleware(RequireHost, hosts=settings.hosts)
    model = ServedModel(llm, settings)
    registry = registry_of(llm)

    @app.get("/health")
    async def health() -> dict[str, str]:
        model.check_running()
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(data=model.cards())

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> ModelCard:
        return model.card(name)

    @app.post("/v1/completions", response_model=Completion)
    async def completions(body: CompletionRequest, request: Request) -> Any:
        return await complete(model, body, request)

    @app.post("/v1/chat/completions", response_model=ChatCompletion)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Any:
        return await chat(model, body, request)

    return app
