"""Server URLs that the command line accepts."""

import pytest

from pilotlight.runtime.cli.api import Api
from pilotlight.runtime.cli.cli_error import CliError


@pytest.mark.parametrize(
    "url", ["ftp://h", "", "http://", "http://h:x", "http://h:70000", "http://[::1", "..", "x" * 70]
)
def test_what_is_no_url_is_refused_with_one_that_is(url: str) -> None:
    with pytest.raises(CliError, match="is not a URL like"):
        Api(url)


def test_a_scheme_may_be_left_out() -> None:
    assert Api("h:1").url == "http://h:1"
