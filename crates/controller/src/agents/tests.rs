use contract::keys;
use fleet::view::{EntityView, FaultView, NodeState, NodeStatus};
use jiff::Timestamp;
use tonic::Code;

use super::*;

fn fault(check: &str, code: &str, edit: fn(&mut FaultView)) -> FaultView {
    let now = Timestamp::UNIX_EPOCH;
    let mut fault = FaultView {
        agent: "a".to_owned(),
        component_class: keys::COMPONENT_GPU.to_owned(),
        check: check.to_owned(),
        code: code.to_owned(),
        subject: String::new(),
        entities: vec![EntityView {
            entity_type: keys::ENTITY_GPU_UUID.to_owned(),
            entity_value: "GPU-1".to_owned(),
        }],
        fatal: true,
        dismissed: false,
        recommended_action: String::new(),
        message: String::new(),
        first_seen: now,
        last_seen: now,
        count: 1,
        event_id: "e".to_owned(),
        reported_by: None,
        explained_by: None,
        incident: String::new(),
    };
    edit(&mut fault);
    fault
}

fn node(name: &str, faults: Vec<FaultView>) -> NodeStatus {
    NodeStatus {
        name: name.to_owned(),
        state: NodeState::Unhealthy,
        session: None,
        in_cluster: None,
        unschedulable: None,
        faults,
        notices: Vec::new(),
        devices: Vec::new(),
        notes: Vec::new(),
    }
}

fn agents(ready: bool, nodes: Vec<NodeStatus>) -> Agents {
    let fleet = FleetView {
        ready,
        nodes,
        ..FleetView::default()
    };
    Agents {
        pods: PodDevices::new(None),
        maintenance: None,
        fleet: watch::channel(Arc::new(fleet)).1,
        store_id: "store-1".to_owned(),
    }
}

async fn faults(
    agents: &Agents,
    caller: Option<Caller>,
    node: &str,
) -> Result<ListFaultsResponse, Status> {
    let mut request = Request::new(ListFaultsRequest {
        node_name: node.to_owned(),
    });
    if let Some(caller) = caller {
        request.extensions_mut().insert(caller);
    }
    let answer = agents.list_faults(request).await;
    answer.map(Response::into_inner)
}

fn of(node: &str) -> Caller {
    Caller::Node(node.to_owned())
}

#[tokio::test]
async fn an_agent_speaks_for_and_learns_of_its_own_node_only() {
    let agents = agents(true, Vec::new());
    let table = [
        (Some(of("n1")), "n1", None),
        (Some(Caller::Anybody), "n1", None),
        (Some(of("n1")), "n2", Some(Code::PermissionDenied)),
        (
            Some(Caller::Central("c".to_owned())),
            "n1",
            Some(Code::PermissionDenied),
        ),
        (None, "n1", Some(Code::PermissionDenied)),
    ];
    for (caller, node, refused) in table {
        let mut report = Request::new(ReportPodsRequest {
            node_name: node.to_owned(),
            pods: Vec::new(),
        });
        if let Some(caller) = caller.clone() {
            report.extensions_mut().insert(caller);
        }
        let reported = agents.report_pods(report).await.err();
        let asked = faults(&agents, caller.clone(), node).await.err();
        for answer in [reported, asked] {
            let code = answer.map(|status| status.code());
            assert_eq!(code, refused, "{caller:?} for {node}");
        }
    }
}

#[tokio::test]
async fn a_node_is_told_the_faults_that_count_and_none_before_all_are_known() {
    let nodes = || {
        vec![
            node("n1", vec![fault(keys::CHECK_XID, "48", |_| {})]),
            node(
                "n2",
                vec![
                    fault(keys::CHECK_XID, "79", |_| {}),
                    fault(keys::CHECK_XID, "13", |fault| fault.fatal = false),
                    fault(keys::CHECK_GPU_POWER, "p", |fault| fault.fatal = false),
                    fault(keys::CHECK_GPU_MEMORY, "m", |fault| fault.dismissed = true),
                ],
            ),
        ]
    };
    let early = faults(&agents(false, nodes()), Some(of("n2")), "n2").await;
    assert_eq!(early.unwrap_err().code(), Code::Unavailable);
    let agents = agents(true, nodes());
    let told = faults(&agents, Some(of("n2")), "n2").await.unwrap();
    assert_eq!(told.store_id, "store-1");
    let codes: Vec<&str> = told
        .faults
        .iter()
        .map(|fault| fault.code.as_str())
        .collect();
    assert_eq!(codes, ["79", "13"]);
    let entity = &told.faults[0].entities[0];
    assert_eq!(
        (entity.r#type.as_str(), entity.value.as_str()),
        ("GPU_UUID", "GPU-1")
    );
    let nothing = faults(&agents, Some(of("n3")), "n3").await.unwrap();
    assert_eq!(nothing.faults, []);
}

#[tokio::test]
async fn only_a_node_itself_tells_its_maintenance_and_only_if_somebody_asks() {
    let told = |agents: Agents, caller: Caller| async move {
        let mut request = Request::new(ReportMaintenanceRequest {
            node_name: "n1".to_owned(),
            notices: Vec::new(),
        });
        request.extensions_mut().insert(caller);
        let answer = agents.report_maintenance(request).await;
        answer.map(drop).map_err(|status| status.code())
    };
    let without = agents(true, Vec::new());
    let with = Agents {
        maintenance: Some(MachineNotices::default()),
        ..without.clone()
    };
    assert_eq!(told(without, of("n1")).await, Err(Code::FailedPrecondition));
    assert_eq!(
        told(with.clone(), of("n2")).await,
        Err(Code::PermissionDenied)
    );
    assert_eq!(told(with, of("n1")).await, Ok(()));
}
