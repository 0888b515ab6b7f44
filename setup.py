"""Build script: the README for package indexes, with absolute links into the repository.

The rest of the build is in pyproject.toml.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
PROJECT = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]


def absolute(text: str, repository: str, version: str) -> str:
    """Make links absolute: to a release's tag, or to main; links of pictures, to the raw file."""
    ref = "main" if "dev" in version else f"v{version}"
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:)([^)]+)", rf"\1{repository}/raw/{ref}/\2", text)
    return re.sub(r"(\]\()(?!https?:)", rf"\1{repository}/blob/{ref}/", text)


setup(
    long_description=absolute(
        (HERE / "README.md").read_text(), PROJECT["urls"]["Repository"], PROJECT["version"]
    ),
    long_description_content_type="text/markdown",
)
