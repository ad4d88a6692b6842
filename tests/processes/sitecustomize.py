"""What Python runs first in every process that a test starts: pandas is not there, as with most who install this, whatever the tests have it for.

pyarrow imports it with the first array that it is given, where it is installed: 0.3 to 0.5 s of each of about a thousand processes.
"""

import sys


class WithoutPandas:
    """Finds no pandas, and leaves all else to others."""

    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("no pandas in processes that tests start", name=fullname)


sys.meta_path.insert(0, WithoutPandas())
