"""Fails unless the file is a list of components as CycloneDX's own library accepts it: sbom.py FILE."""

import pathlib
import sys

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

text = pathlib.Path(sys.argv[1]).read_text()
sys.exit(JsonStrictValidator(SchemaVersion.V1_6).validate_str(text))
