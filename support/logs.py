"""The log of a server's process: one line per event, with its time, on standard error; the same for routers and sites."""

import logging


def start_logging(process: str, level: int = logging.INFO) -> None:
    """`process`: its name in each line, as "router" or a site's."""
    logging.basicConfig(level=level, format=f"%(asctime)s {process.replace('%', '%%')} %(levelname)s %(message)s")
