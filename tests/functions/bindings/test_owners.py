"""A function may not use another owner's resources, unless the site file shares them."""

from pathlib import Path

import pytest

from pilotlight.functions.bindings.binding import BindingError
from pilotlight.functions.bindings.owners import SITE, Owners
from pilotlight.functions.manifest import Manifest, load_manifest

NAMES = {
    "kv:1": '[[kv_namespaces]]\nbinding = "A"\nid = "1"',
    "kv:PLAIN": '[[kv_namespaces]]\nbinding = "PLAIN"',
    "d1:2": '[[d1_databases]]\nbinding = "A"\ndatabase_name = "x"\ndatabase_id = "2"',
    "r2:box": '[[r2_buckets]]\nbinding = "A"\nbucket_name = "box"',
    "queue:q": '[[queues.producers]]\nbinding = "A"\nqueue = "q"',
    "queue:in": '[[queues.consumers]]\nqueue = "in"',
    "queue:dead": '[[queues.consumers]]\nqueue = "own-NAME"\ndead_letter_queue = "dead"',
    "vectorize:i": '[[vectorize]]\nbinding = "A"\nindex_name = "i"',
    "analytics_engine:d": '[[analytics_engine_datasets]]\nbinding = "A"\ndataset = "d"',
    "analytics_engine:BARE": '[[analytics_engine_datasets]]\nbinding = "BARE"',
    "secrets_store:s": '[[secrets_store_secrets]]\nbinding = "A"\nstore_id = "s"\nsecret_name = "n"',
    "rate_limit:7": '[[ratelimits]]\nname = "A"\nnamespace_id = "7"\nsimple = { limit = 1, period = 10 }',
}
OF_A_FUNCTION = {
    "service:victim": '[[services]]\nbinding = "A"\nservice = "victim"\nentrypoint = "Internal"',
    "durable_object:victim": '[[durable_objects.bindings]]\nname = "A"\nclass_name = "C"\nscript_name = "victim"',
}


def manifest(folder: Path, name: str, text: str) -> Manifest:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "entry.py").write_text("")
    (folder / name / "wrangler.toml").write_text(f'name = "{name}"\nmain = "entry.py"\n{text.replace("NAME", name)}\n')
    return load_manifest(folder / name)


@pytest.mark.parametrize("victim", ["the site's", "the function victim's"])
@pytest.mark.parametrize("thing", [*NAMES, *OF_A_FUNCTION])
def test_a_deployed_function_that_names_anothers_is_refused_and_shared_only_by_the_site_file(
    tmp_path: Path, thing: str, victim: str
) -> None:
    text = {**NAMES, **OF_A_FUNCTION}[thing]
    own = {"victim"} if victim == "the site's" else set()
    owners = Owners(tmp_path, own, {})
    owners.claim(manifest(tmp_path, "victim", text))
    hostile = manifest(tmp_path, "hostile", text)
    for ask in (owners.check, owners.claim):
        with pytest.raises(BindingError, match=f"hostile may not use {thing}, which is {victim}; .*shares it"):
            ask(hostile)
    with pytest.raises(BindingError, match=thing):  # also after a restart, and if another resource is shared
        Owners(tmp_path, own, {thing: ("other",), f"{thing}1": ("hostile",)}).check(hostile)
    Owners(tmp_path, own, {thing: ("host*",)}).claim(hostile)
    owners.claim(manifest(tmp_path, "victim", text))


@pytest.mark.parametrize("thing", [*NAMES, *OF_A_FUNCTION])
def test_the_functions_of_the_site_file_share_what_is_the_sites(tmp_path: Path, thing: str) -> None:
    text = {**NAMES, **OF_A_FUNCTION}[thing]
    for name in ("victim", "other"):
        Owners(tmp_path, ("victim", "other"), {}).claim(manifest(tmp_path, name, text))
    Owners(tmp_path, ("other",), {}).claim(manifest(tmp_path, "other", text))  # the site file no longer names `victim`


def test_what_a_deployed_function_has_filled_is_not_mixed_with_what_the_sites_functions_have(tmp_path: Path) -> None:
    owners = Owners(tmp_path, ("web",), {})
    owners.claim(manifest(tmp_path, "deployed", NAMES["kv:1"]))
    with pytest.raises(BindingError, match="web may not use kv:1, which is the function deployed's"):
        owners.check(manifest(tmp_path, "web", NAMES["kv:1"]))


def test_what_was_only_looked_at_has_no_owner(tmp_path: Path) -> None:
    owners = Owners(tmp_path, (), {})
    owners.check(manifest(tmp_path, "refused", NAMES["kv:1"]))
    owners.claim(manifest(tmp_path, "one", NAMES["kv:1"]))
    with pytest.raises(BindingError, match="the function one's"):
        owners.claim(manifest(tmp_path, "refused", NAMES["kv:1"]))


def test_props_for_another_function_need_a_word_of_the_site_file_of_their_own(tmp_path: Path) -> None:
    text = '[[services]]\nbinding = "A"\nservice = "victim"\nprops = { role = "admin" }'
    shared = {"service:victim": ("hostile",)}
    with pytest.raises(BindingError, match="hostile may not use props:victim"):
        Owners(tmp_path, (), shared).check(manifest(tmp_path, "hostile", text))
    Owners(tmp_path, (), shared | {"props:victim": ("hostile",)}).check(manifest(tmp_path, "hostile", text))
    Owners(tmp_path, (), {}).check(manifest(tmp_path, "victim", text))


def test_models_and_unnamed_resources_have_no_owner(tmp_path: Path) -> None:
    text = '[[services]]\nbinding = "A"\nservice = "@org/model"\n[[ratelimits]]\nname = "B"\nsimple = { limit = 1, period = 10 }'
    for name in ("one", "two"):
        Owners(tmp_path, (), {}).claim(manifest(tmp_path, name, text))


@pytest.mark.parametrize(("own", "written"), [((), "one"), (("one",), SITE)])
def test_an_owner_that_was_half_written_is_written_again(tmp_path: Path, own: tuple[str, ...], written: str) -> None:
    one = manifest(tmp_path, "one", NAMES["kv:1"])
    Owners(tmp_path, own, {}).claim(one)
    (file,) = tmp_path.glob("bindings/kv/*/owner")
    file.write_text("")
    Owners(tmp_path, own, {}).claim(one)
    assert file.read_text() == written
