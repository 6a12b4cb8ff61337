"""Other servers of the same public ViT-Ti/16, for benchmarks/serving.py.

    python benchmarks/serving_peers.py NAME PORT WEIGHTS

NAME is timm (FastAPI), transformers (a pipeline behind FastAPI) or litserve (with timm). WEIGHTS is timm's file, or
the folder that transformers reads. Each computes one photo at a time on one thread, as its documentation shows.
"""

import sys
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import torch
from PIL import Image
from support import torchvision_shim  # noqa: F401  # pyright: ignore[reportUnusedImport]  # before torchvision

MODEL = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"


class TimmModel:
    """The steps of timm's model card."""

    def __init__(self, weights: str) -> None:
        import timm
        from timm.data.config import resolve_model_data_config
        from timm.data.transforms_factory import create_transform

        torch.set_num_threads(1)
        self.model: Any = timm.create_model(MODEL, checkpoint_path=weights).eval()
        self.transform: Any = create_transform(**resolve_model_data_config(self.model))

    def predict(self, body: bytes) -> list[dict[str, Any]]:
        torch.set_num_threads(1)  # of this thread
        with torch.inference_mode():
            pixels = self.transform(Image.open(BytesIO(body)).convert("RGB"))[None]
            top = self.model(pixels).softmax(-1)[0].topk(5)
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return [{"label": str(index), "score": score} for index, score in pairs]


class TransformersModel:
    """The pipeline of transformers."""

    def __init__(self, folder: str) -> None:
        from transformers import pipeline

        torch.set_num_threads(1)
        self.pipeline: Any = pipeline("image-classification", model=folder, device="cpu")

    def predict(self, body: bytes) -> list[dict[str, Any]]:
        torch.set_num_threads(1)
        return self.pipeline(Image.open(BytesIO(body)).convert("RGB"), top_k=5)


def serve_with_fastapi(model: Any, port: int) -> None:
    import uvicorn

    fastapi: Any = import_module("fastapi")
    app = fastapi.FastAPI()

    @app.post("/")
    def predict(body: bytes = fastapi.Body(media_type="image/jpeg")) -> Any:  # pyright: ignore[reportUnusedFunction]
        return model.predict(body)

    uvicorn.run(app, port=port, log_level="critical", access_log=False)


def main(name: str, port: str, weights: str) -> None:
    if name == "litserve":
        import_module("serving_litserve").serve(weights, int(port))
    else:
        serve_with_fastapi((TimmModel if name == "timm" else TransformersModel)(weights), int(port))


if __name__ == "__main__":
    main(*sys.argv[1:])
