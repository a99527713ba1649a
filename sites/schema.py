"""JSON Schemas of the site and network files, for editors. `python -m sites.schema` rewrites the two files beside this one."""

import json
from pathlib import Path

from sites.config import NetworkConfig, SiteConfig, Table

HERE = Path(__file__).parent
FILES: dict[str, type[Table]] = {"site.schema.json": SiteConfig, "network.schema.json": NetworkConfig}


def render(table: type[Table]) -> str:
    return json.dumps(table.model_json_schema(), indent=2) + "\n"


if __name__ == "__main__":
    for file_name, table in FILES.items():
        (HERE / file_name).write_text(render(table), encoding="utf-8")
