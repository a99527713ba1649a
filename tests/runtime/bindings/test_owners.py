"""What a function may name that is another's: nothing, unless the site file shares it."""

from pathlib import Path

import pytest

from runtime.bindings.binding import BindingError
from runtime.bindings.owners import Owners
from runtime.functions.manifest import Manifest, load_manifest

NAMES = {
    "kv:1": '[[kv_namespaces]]\nbinding = "A"\nid = "1"',
    "kv:PLAIN": '[[kv_namespaces]]\nbinding = "PLAIN"',
    "d1:2": '[[d1_databases]]\nbinding = "A"\ndatabase_name = "x"\ndatabase_id = "2"',
    "r2:box": '[[r2_buckets]]\nbinding = "A"\nbucket_name = "box"',
    "queue:q": '[[queues.producers]]\nbinding = "A"\nqueue = "q"',
    "queue:in": '[[queues.consumers]]\nqueue = "in"',
    "queue:dead": '[[queues.consumers]]\nqueue = "own-NAME"\ndead_letter_queue = "dead"',
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


@pytest.mark.parametrize("thing", [*NAMES, *OF_A_FUNCTION])
def test_a_manifest_that_names_a_neighbours_is_refused_and_shared_only_by_the_site_file(
    tmp_path: Path, thing: str
) -> None:
    text = {**NAMES, **OF_A_FUNCTION}[thing]
    owners = Owners(tmp_path, {})
    owners.claim(manifest(tmp_path, "victim", text))
    hostile = manifest(tmp_path, "hostile", text)
    with pytest.raises(BindingError, match=f"hostile may not use {thing}, which is the function victim's; .*shares it"):
        owners.claim(hostile)
    with pytest.raises(BindingError, match=thing):  # also after a restart, and if another thing is shared
        Owners(tmp_path, {thing: ("other",), f"{thing}1": ("hostile",)}).claim(hostile)
    Owners(tmp_path, {thing: ("host*",)}).claim(hostile)
    owners.claim(manifest(tmp_path, "victim", text))


def test_props_for_another_function_need_a_word_of_the_site_file_of_their_own(tmp_path: Path) -> None:
    text = '[[services]]\nbinding = "A"\nservice = "victim"\nprops = { role = "admin" }'
    shared = {"service:victim": ("hostile",)}
    with pytest.raises(BindingError, match="hostile may not use props:victim"):
        Owners(tmp_path, shared).claim(manifest(tmp_path, "hostile", text))
    Owners(tmp_path, shared | {"props:victim": ("hostile",)}).claim(manifest(tmp_path, "hostile", text))
    Owners(tmp_path, {}).claim(manifest(tmp_path, "victim", text))


def test_models_and_what_has_no_name_of_its_own_are_nobodys(tmp_path: Path) -> None:
    text = '[[services]]\nbinding = "A"\nservice = "@org/model"\n[[ratelimits]]\nname = "B"\nsimple = { limit = 1, period = 10 }'
    for name in ("one", "two"):
        Owners(tmp_path, {}).claim(manifest(tmp_path, name, text))


def test_an_owner_that_was_half_written_is_written_again(tmp_path: Path) -> None:
    one = manifest(tmp_path, "one", NAMES["kv:1"])
    Owners(tmp_path, {}).claim(one)
    (file,) = tmp_path.glob("bindings/kv/*/owner")
    file.write_text("")
    Owners(tmp_path, {}).claim(one)
    assert file.read_text() == "one"
