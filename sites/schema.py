"""Write the JSON Schemas of configuration files for editors: `python -m pilotlight.sites.schema`."""

import json
from pathlib import Path

import msgspec

from pilotlight.sites.network import NetworkConfig
from pilotlight.sites.site import SiteConfig
from pilotlight.sites.table import Table

HERE = Path(__file__).parent
FILES: dict[str, type[Table]] = {"site.schema.json": SiteConfig, "network.schema.json": NetworkConfig}


def render(table: type[Table]) -> str:
    _, tables = msgspec.json.schema_components([table], ref_template="#/$defs/{name}")
    top = tables.pop(table.__name__)
    text = json.dumps({"$defs": tables, **top}, indent=2)
    return text.replace(r"\\Z", "$") + "\n"  # editors' patterns write the end of a string as $


if __name__ == "__main__":
    for file_name, table in FILES.items():
        (HERE / file_name).write_text(render(table), encoding="utf-8")
