"""A session of pytest in which the workers of one test of workerd are served.

workerd_tests.py copies this file to a folder with `folders.json`, the workers' folders by label, and reads `outcomes.json`: label, part and failure
of each test. It imports nothing of this project: the fixture is what authors have.
"""

import json
from pathlib import Path

HERE = Path(__file__).parent


def test_workers(make_worker):
    folders = json.loads((HERE / "folders.json").read_text())
    found = []
    for label, folder in folders.items():
        others = [Path(each) for each in folders.values() if each != folder]
        served = make_worker(Path(folder), services=others)
        for part in served.run(served.env.TESTER.names(len(folders) == 1)):
            found.append([label, part, served.run(served.env.TESTER.outcome(part))])
    (HERE / "outcomes.json").write_text(json.dumps(found))
