"""Forms with one file, as `curl -F image=@photo.jpg` sends them; parsed in memory, since the body is bounded."""

import re

from vitrail.serve.request_errors import RequestError

MAX_FIELDS = 16
BOUNDARY = re.compile(rb"--([!-~ ]{1,200}?)\r\n")
PARAMETER = re.compile(r';\s*(name|filename)="((?:[^"\\]|\\.)*)"', re.IGNORECASE)


def is_multipart(body: bytes) -> bool:
    """Whether the body begins with a boundary and the headers of a part."""
    found = BOUNDARY.match(body)
    return found is not None and body[found.end() :][:20].lower().startswith(b"content-")


def parse_multipart(body: bytes) -> tuple[bytes, dict[str, str]]:
    """The file, and the other fields as text."""
    found = BOUNDARY.match(body)
    assert found is not None
    mark = b"\r\n--" + found[1]
    parts = (b"\r\n" + body).split(mark)
    if len(parts) < 3 or not parts[-1].startswith(b"--"):
        raise RequestError(400, "the form is not complete: its last boundary is missing; send it again")
    if len(parts) - 2 > MAX_FIELDS:
        raise RequestError(400, f"the form has {len(parts) - 2} fields; expected at most {MAX_FIELDS}")
    files, fields = list[bytes](), dict[str, str]()
    for part in parts[1:-1]:
        head, middle, content = part.removeprefix(b"\r\n").partition(b"\r\n\r\n")
        if not middle or len(head) > 4096:
            raise RequestError(400, "a field of the form has no end of its headers; send the form again")
        names = dict(PARAMETER.findall(head.decode("utf-8", "replace")))
        if "filename" in names or b"content-type:" in head.lower():
            files.append(content)
        else:
            fields[names.get("name", "")] = content.decode("utf-8", "replace")
    if len(files) != 1:
        raise RequestError(400, f"the form has {len(files)} files; expected one, as from: curl -F image=@photo.jpg")
    return files[0], fields
