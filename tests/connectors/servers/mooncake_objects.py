"""A client of a Mooncake store that copies objects into files of a folder, ``get``, or files into objects, ``put``.

python -m tests.connectors.servers.mooncake_objects get|put MASTER FOLDER QUOTED_KEY ...
"""

import sys
from pathlib import Path
from urllib.parse import unquote

from mooncake.store import MooncakeDistributedStore

from kvobs.testing.server import HOST
from tests.connectors.servers.stores import BUFFER

if __name__ == "__main__":
    verb, master, folder, *names = sys.argv[1:]
    store = MooncakeDistributedStore()
    assert store.setup(HOST, "P2PHANDSHAKE", 0, BUFFER, "tcp", "", master) == 0
    for name in names:
        path = Path(folder) / name
        if verb == "get":
            path.write_bytes(store.get(unquote(name)))
        else:
            assert store.upsert(unquote(name), path.read_bytes()) == 0, name
    store.close()
