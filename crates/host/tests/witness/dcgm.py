"""Prints the layouts and constants of NVIDIA's Python bindings for DCGM."""

import ctypes
import json

from model_analyzer.monitor.dcgm import dcgm_errors as errors
from model_analyzer.monitor.dcgm import dcgm_fields as fields
from model_analyzer.monitor.dcgm import dcgm_structs as structs
from model_analyzer.monitor.dcgm import dcgmvalue as values


def layout(structure):
    places = {name: getattr(structure, name).offset for name, _ in structure._fields_}
    return {"size": ctypes.sizeof(structure), "places": places}


def numbers(module, prefix):
    found = {name: getattr(module, name) for name in dir(module) if name.startswith(prefix)}
    return {name: value for name, value in found.items() if isinstance(value, int)}


print(
    json.dumps(
        {
            "layouts": {
                "connect": layout(structs.c_dcgmConnectV2Params_v2),
                "value": layout(structs.c_dcgmFieldValue_v2),
                "version": layout(structs.c_dcgmVersionInfo_v2),
                "health": layout(structs.c_dcgmHealthResponse_v4),
                "incident": layout(structs.c_dcgmIncidentInfo_t),
                "entity": layout(structs.c_dcgmGroupEntityPair_t),
            },
            "numbers": {
                **numbers(structs, "DCGM_"),
                **numbers(structs, "dcgm"),
                **numbers(structs, "c_dcgm"),
                **numbers(fields, "DCGM_FE_"),
                **numbers(fields, "DCGM_FI_DEV_"),
                **numbers(values, "DCGM_INT64_BLANK"),
            },
            "errors": numbers(errors, "DCGM_FR_"),
        }
    )
)
