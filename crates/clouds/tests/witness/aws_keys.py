"""botocore looks for credentials in the place that our client has found some in.

Reads from stdin the environment of each place. Writes the keys.
"""

import json
import os

from botocore.session import Session

told = []
for variables in json.loads(input()):
    os.environ.clear()
    # Not the files of a person.
    os.environ.update(variables, HOME="/nonexistent")
    found = Session().get_credentials().get_frozen_credentials()
    told.append([found.access_key, found.secret_key, found.token])
print(json.dumps(told))
