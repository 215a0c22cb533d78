"""Sends a health event with stock grpcio: client.py STUBS_DIRECTORY TARGET CALLS.

The channel takes no options, as in NVSentinel's Python monitors. Prints the status code
of the first call that fails and ends with 1 then.
"""

import sys

sys.path.insert(0, sys.argv[1])

import grpc  # noqa: E402
import health_event_pb2 as pb  # noqa: E402
import health_event_pb2_grpc as service  # noqa: E402


def full_events():
    """Has every field set; `full_events()` of interop.rs is the same."""
    event = pb.HealthEvent(
        version=1,
        agent="interop",
        componentClass="GPU",
        checkName="SysLogsXIDError",
        isFatal=True,
        isHealthy=False,
        message="Xid 79: GPU has fallen off the bus \N{EM DASH} μ",
        recommendedAction=77,  # a number that the contract does not name
        errorCode=["79", "119"],
        entitiesImpacted=[
            pb.Entity(entityType="PCI", entityValue="0000:b3:00"),
            pb.Entity(entityType="GPU_UUID", entityValue="GPU-1c9f"),
        ],
        metadata={"driver": "580.65.06", "": "empty key"},
        nodeName="node-1",
        quarantineOverrides=pb.BehaviourOverrides(force=True),
        drainOverrides=pb.BehaviourOverrides(skip=True),
        processingStrategy=pb.STORE_AND_ANALYSE,
        id="id-1",
        customRecommendedAction="RESEAT_RISER",
    )
    event.generatedTimestamp.seconds = 1_790_000_000
    event.generatedTimestamp.nanos = 123_456_789
    # More than one DATA frame, and more than the first flow-control window.
    large = pb.HealthEvent(message="x" * 200_000)
    return pb.HealthEvents(version=1, events=[event, large])


def main():
    target, calls = sys.argv[2], int(sys.argv[3])
    with grpc.insecure_channel(target) as channel:
        stub = service.PlatformConnectorStub(channel)
        for call in range(calls):
            # The same metadata each time, and some that changes: both ways of indexing.
            metadata = [("trace-bin", b"\x00\xff" * 20), ("call", str(call)), ("same", "s" * 2000)]
            try:
                stub.HealthEventOccurredV1(full_events(), timeout=20, metadata=metadata)
            except grpc.RpcError as error:
                print(error.code().name, error.details())
                sys.exit(1)


main()
