"""Oracle's own client reads our fake of OCI, with our configuration file, and signs our requests itself.

Reads from stdin the URL of the fake, the compartment, and requests as our client has signed them. Writes the
events it read, and its own signature of each request. A field or a word that is not in Oracle's model ends it.
"""

import json
import os

import oci
import requests

KNOWN = oci.core.models.InstanceMaintenanceEventSummary().attribute_map.values()
MODEL = oci.core.models.InstanceMaintenanceEvent
WORDS = {name: value for name, value in vars(MODEL).items() if name.isupper()}


def check_response(response, *_, **__):
    """Compares the fields of events with the model, which the client itself does not."""
    for event in response.json() if response.ok else []:
        assert set(event) <= set(KNOWN), f"{event} has an unknown field"


def check_word(event, field):
    word = getattr(event, field)
    words = [value for name, value in WORDS.items() if name.startswith(field.upper())]
    assert word is None or word in words, f"{field} is {word!r}, not one of {words}"


def shown(event):
    """Returns what both clients have of a notice."""
    for field in ("maintenance_category", "instance_action", "lifecycle_state"):
        check_word(event, field)
    start = event.time_window_start.strftime("%Y-%m-%dT%H:%M:%SZ")
    return [event.id, event.instance_id, event.lifecycle_state, start]


def signed(request):
    """Returns the header of a signature of a request with its date."""
    signer = oci.signer.Signer.from_config(config)
    if not request["host"]:
        # As the client of the auth service does.
        signer.create_signers(
            signer.api_key,
            signer.private_key,
            ["date", "(request-target)"],
            ["content-length", "content-type", "x-content-sha256"],
        )
    headers = {"date": request["date"], "content-type": "application/json"}
    made = requests.Request(request["method"], request["url"], headers, data=request["body"])
    return signer(made.prepare()).headers["authorization"]


asked = json.loads(input())
config = oci.config.from_file(os.environ["OCI_CONFIG_FILE"], os.environ["OCI_CLI_PROFILE"])
config["region"] = "us-phoenix-1"
client = oci.core.ComputeClient(
    config, service_endpoint=asked["url"], retry_strategy=oci.retry.NoneRetryStrategy()
)
client.base_client.session.hooks["response"].append(check_response)
listed = oci.pagination.list_call_get_all_results(
    client.list_instance_maintenance_events, asked["compartment"], limit=500
)
told = {"events": list(map(shown, listed.data)), "signed": list(map(signed, asked["requests"]))}
print(json.dumps(told))
