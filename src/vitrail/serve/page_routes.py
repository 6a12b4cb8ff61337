"""The page, the example photos, and what the page asks a model for."""

import gzip
import hashlib
import json
from collections import OrderedDict
from functools import lru_cache, partial
from pathlib import Path
from time import perf_counter

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vitrail import __version__
from vitrail.base.kinds import Explorer
from vitrail.data.photos import list_example_photos
from vitrail.serve.explain import describe_explanation
from vitrail.serve.prediction_routes import answer_json
from vitrail.serve.request_errors import RequestError
from vitrail.serve.scheduler import Work
from vitrail.serve.service import Service

PAGE_FOLDER = Path(__file__).with_name("page")
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".wasm": "application/wasm",
}
COMPRESSED = (".html", ".css", ".js", ".json", ".svg")
CACHE_BYTES = 256 * 2**20  # of explanations
ENTRY_BYTES = 500  # that an entry needs next to its answer


class AnswerCache:
    """The newest answers, in memory, bounded by their bytes."""

    def __init__(self, most: int = CACHE_BYTES) -> None:
        self.most, self.held = most, 0
        self.answers: OrderedDict[bytes, bytes] = OrderedDict()

    def get(self, key: bytes) -> bytes | None:
        if key in self.answers:
            self.answers.move_to_end(key)
        return self.answers.get(key)

    def put(self, key: bytes, answer: bytes) -> None:
        if len(answer) > self.most or key in self.answers:
            return
        self.answers[key] = answer
        self.held += len(answer) + ENTRY_BYTES
        while self.held > self.most:
            self.held -= len(self.answers.popitem(last=False)[1]) + ENTRY_BYTES


class PageRoutes:
    """Files are found by names that were listed at the start: no path of a request reaches the disk."""

    def __init__(self, service: Service) -> None:
        self.service, self.cache = service, AnswerCache()
        listed = PAGE_FOLDER.rglob("*") if PAGE_FOLDER.is_dir() else ()
        files = [path for path in listed if path.suffix in TYPES and path.is_file()]
        self.files = {path.relative_to(PAGE_FOLDER).as_posix(): path for path in files}
        self.photos = {path.stem: path for path in list_example_photos()}

    def list_routes(self) -> list[Route]:
        return [
            Route("/", self.show_page, methods=["GET"]),
            Route("/page/{name:path}", self.send_page_file, methods=["GET"]),
            Route("/favicon.svg", self.send_icon, methods=["GET"]),
            Route("/favicon.ico", self.send_icon, methods=["GET"]),
            Route("/explore", self.describe, methods=["GET"]),
            Route("/examples/{name}", self.send_example, methods=["GET"]),
            Route("/models/{model}/explore", self.explore, methods=["POST"]),
            Route("/explain", self.explain, methods=["POST"]),
            Route("/models/{model}/explain", self.explain, methods=["POST"]),
        ]

    async def show_page(self, request: Request) -> Response:
        return send_file(request, self.files, "index.html")

    async def send_page_file(self, request: Request) -> Response:
        return send_file(request, self.files, request.path_params["name"])

    async def send_icon(self, request: Request) -> Response:
        return send_file(request, self.files, "favicon.svg")

    async def send_example(self, request: Request) -> Response:
        name = request.path_params["name"].removesuffix(".jpg")
        return send_file(request, self.photos, name)

    async def describe(self, request: Request) -> Response:  # noqa: ARG002
        examples = [{"name": name, "title": name.capitalize()} for name in self.photos]
        models = [each.describe() for each in self.service.models]
        known = ("name", "explore", "reason")  # the facts would repeat the labels
        shown = [{name: model[name] for name in known} for model in models]
        return JSONResponse({"version": __version__, "models": shown, "examples": examples})

    async def explore(self, request: Request) -> Response:
        return Response(await self.find_figures(request), media_type="application/octet-stream")

    async def explain(self, request: Request) -> Response:
        """The explanation as JSON; the page reads the figures of `explore`."""
        return answer_json(describe_explanation(await self.find_figures(request)))

    async def find_figures(self, request: Request) -> bytes:
        """The figures of one photo or text as a safetensors file, computed or remembered."""
        service, lane = self.service, self.service.explanations
        model = service.models.find(request.path_params.get("model"))
        request.state.model = model.name
        explorer = model.explorer
        if explorer is None:
            raise RequestError(404, f"{model.name} cannot be explored: {model.no_explorer_reason}")
        service.bodies.check_length(request)
        lane.check_wait(model.name)
        query = dict(request.query_params)
        with service.bodies.count() as held:
            body = await service.bodies.read(request, held)
            if not body:
                raise RequestError(400, "the body is empty; send the bytes of a photo, or a text in UTF-8")
            about = json.dumps((model.number, sorted(query.items()))).encode()  # a hash, since a query may be long
            key = hashlib.sha256(hashlib.sha256(body).digest() + about).digest()
            found = self.cache.get(key)
            if found is None:
                compute = partial(compute_figures, explorer, body, query)
                (found,) = await service.compute(request, lane, model.name, [compute], service.settings.explore_timeout)
                self.cache.put(key, found)
        return found


def compute_figures(explorer: Explorer, body: bytes, query: dict[str, str], work: Work) -> bytes:
    start = perf_counter()
    found = explorer.explore(body, query)
    work.timings["inference"] = perf_counter() - start
    return found


def send_file(request: Request, files: dict[str, Path], name: str) -> Response:
    """A small file with its type; 304 if the client has it."""
    if name not in files:
        raise RequestError(404, f"no file has the name {name[:100]!r}; expected a name that the page uses")
    path = files[name]
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {"etag": tag, "cache-control": "no-cache", "vary": "accept-encoding"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    if path.suffix in COMPRESSED and "gzip" in request.headers.get("accept-encoding", ""):
        content, headers["content-encoding"] = compress(content), "gzip"
    return Response(content, media_type=TYPES[path.suffix], headers=headers)


@lru_cache(maxsize=128)
def compress(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)
