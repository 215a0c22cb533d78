"""Speaks to the Device API with stock grpcio: devices.py STUBS_DIRECTORY TARGET.

Prints one line of JSON for each thing it sees, and takes commands on standard input:
"list", "watch", "register NAME", "bad NAME", "well NAME" and "again", which watches from the last
version that was seen. Channels take no options.
"""

import json
import sys
import threading

sys.path.insert(0, sys.argv[1])

import device_pb2 as pb  # noqa: E402
import device_pb2_grpc as service  # noqa: E402
import grpc  # noqa: E402

PROVIDER = "python-monitor"
KEPT = {"version": ""}


def show(**found):
    # One call for the whole line: 'print' writes its end apart, and two threads show things.
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def conditions(gpu):
    return {one.type: pb.ConditionStatus.Name(one.status)[17:] for one in gpu.status.conditions}


def watch(channel):
    request = pb.WatchGpusRequest(resource_version=KEPT["version"])
    try:
        for event in service.GpuServiceStub(channel).WatchGpus(request):
            KEPT["version"] = event.resource_version or KEPT["version"]
            kind = pb.WatchEventType.Name(event.type)[17:]
            show(event=kind, name=event.gpu.name, conditions=conditions(event.gpu))
    except grpc.RpcError as error:
        show(event="ended", code=error.code().name)


def main():
    channel = grpc.insecure_channel(sys.argv[2])
    for line in sys.stdin:
        command, _, name = line.strip().partition(" ")
        provider = service.ProviderServiceStub(channel)
        if command == "list":
            listed = service.GpuServiceStub(channel).ListGpus(pb.ListGpusRequest(), timeout=20)
            show(list={gpu.name: conditions(gpu) for gpu in listed.gpus})
            KEPT["version"] = listed.resource_version
        elif command in ("watch", "again"):
            if command == "again":
                # A channel of its own: the first one waits before it connects again.
                channel = grpc.insecure_channel(sys.argv[2], [("client", "again")])
                grpc.channel_ready_future(channel).result(timeout=20)
            threading.Thread(target=watch, args=(channel,), daemon=True).start()
        elif command == "register":
            registered = provider.RegisterGpu(
                pb.RegisterGpuRequest(name=name, provider_id=PROVIDER), timeout=20
            )
            show(created=registered.created)
        else:
            status = pb.CONDITION_STATUS_FALSE if command == "bad" else pb.CONDITION_STATUS_TRUE
            condition = pb.Condition(type="Looks", status=status, reason="Seen")
            provider.UpdateGpuCondition(
                pb.UpdateGpuConditionRequest(name=name, condition=condition, provider_id=PROVIDER),
                timeout=20,
            )
            show(updated=name)


main()
