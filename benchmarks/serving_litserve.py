"""timm behind LitServe, for benchmarks/serving_peers.py: its workers import the class from a module."""

from importlib import import_module
from typing import Annotated, Any

from serving_peers import TimmModel

litserve: Any = import_module("litserve")
fastapi: Any = import_module("fastapi")


class TimmApi(litserve.LitAPI):
    def __init__(self, weights: str) -> None:
        super().__init__(api_path="/")
        self.weights = weights

    def setup(self, device: str) -> None:
        del device
        self.timm = TimmModel(self.weights)

    def decode_request(self, request: Annotated[bytes, fastapi.Body(media_type="image/jpeg")]) -> bytes:
        return request

    def predict(self, x: bytes) -> Any:
        return self.timm.predict(x)

    def encode_response(self, output: Any) -> Any:
        return output


def serve(weights: str, port: int) -> None:
    server = litserve.LitServer(TimmApi(weights), accelerator="cpu", workers_per_device=2)
    server.run(port=port, host="127.0.0.1", log_level="critical", generate_client_file=False)
