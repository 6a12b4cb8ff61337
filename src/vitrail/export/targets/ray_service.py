# pyright: basic
"""An exported model as a deployment of Ray Serve: POST the bytes of a photo, with ?top_k=3 for fewer classes."""

import asyncio
from pathlib import Path

from ray import serve  # pyright: ignore[reportMissingImports]
from starlette.requests import Request
from starlette.responses import JSONResponse

import vitrail

MODEL = Path(__file__).with_name("model")


@serve.deployment
class PhotoClassifier:
    def __init__(self) -> None:
        self.predictor = vitrail.Predictor(MODEL, threads=1)

    async def __call__(self, request: Request) -> JSONResponse:
        photo = await request.body()
        try:
            top = int(request.query_params.get("top_k", 5))
            found = await asyncio.to_thread(self.predictor.predict, photo, top=top)
        except (ValueError, vitrail.VitrailError) as error:
            return JSONResponse({"error": str(error)}, 400)
        return JSONResponse([{"label": each.name, "score": each.probability} for each in found.top])


app = PhotoClassifier.bind()  # pyright: ignore[reportAttributeAccessIssue]
