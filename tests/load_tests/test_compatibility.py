"""Compatibility runs: how functions are found in clones of other authors' repositories, and the certificates of stand-in servers."""

import ssl
from pathlib import Path

from load_tests.compatibility.examples import EXAMPLES
from load_tests.compatibility.others import functions, main_of, model_options
from load_tests.compatibility.stand_ins import StandIns


def test_a_function_is_a_folder_whose_manifest_names_a_python_file_that_is_there(tmp_path: Path) -> None:
    for name, manifest, source in (
        ("a", ("wrangler.toml", 'main = "src/entry.py"'), "src/entry.py"),
        ("b", ("wrangler.jsonc", '{"main": "w.py", /* old */}'), "w.py"),
        ("c", ("wrangler.toml", 'main = "src/index.ts"'), "src/index.ts"),
        ("d", ("wrangler.toml", 'main = "gone.py"'), "other.py"),
        ("node_modules/e", ("wrangler.toml", 'main = "w.py"'), "w.py"),
    ):
        (tmp_path / name / source).parent.mkdir(parents=True)
        (tmp_path / name / source).touch()
        (tmp_path / name / manifest[0]).write_text(manifest[1])
    assert sorted(path.name for path in functions(tmp_path)) == ["a", "b"]
    (tmp_path / "broken.toml").write_text("main = ")
    assert main_of(tmp_path / "broken.toml") == ""


def test_models_of_workers_ai_that_its_files_name_are_options(tmp_path: Path) -> None:
    (tmp_path / "entry.py").write_text(
        'run("@cf/meta/llama-3", x); run(\'@hf/org/m\', y); run("@cf/meta/llama-3", z); mail("a@cf/b")'
    )
    assert model_options(tmp_path) == ["--model", "@cf/meta/llama-3=ember", "--model", "@hf/org/m=ember"]


def test_a_stand_in_is_trusted_by_who_reads_its_authorities(tmp_path: Path) -> None:
    async def nobody(request: object) -> object:
        raise AssertionError

    stand_ins = StandIns(tmp_path, {"example.test": nobody})
    stand_ins.write_files()
    context = ssl.create_default_context(cafile=tmp_path / "authorities.pem")
    assert any(("commonName", "stand-ins") in pairs for each in context.get_ca_certs() for pairs in each["subject"])
    ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(tmp_path / "server.pem")
    assert "127.77.0.1 example.test" in (tmp_path / "hosts").read_text()


def test_every_example_of_the_repository_has_its_check() -> None:
    assert [int(example.name[:2]) for example in EXAMPLES] == list(range(1, 20))
