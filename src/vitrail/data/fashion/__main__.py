"""`python -m vitrail.data.fashion photos`: write some of the bundled images as a folder of photos to try things on."""

import sys
from pathlib import Path

from vitrail.base.errors import DataError, VitrailError
from vitrail.data.fashion import EXAMPLE_CLASSES, write_photos

if __name__ == "__main__":
    try:
        if len(sys.argv) != 2:
            raise DataError(f"{len(sys.argv) - 1} arguments; expected one: python -m vitrail.data.fashion FOLDER")
        write_photos(Path(sys.argv[1]))
    except VitrailError as error:
        sys.stderr.write(f"vitrail.data.fashion: {error}\n")
        sys.exit(error.exit_code)
    sys.stdout.write(f"{sys.argv[1]}: 400 images for training, 100 for validation; {', '.join(EXAMPLE_CLASSES)}\n")
