-- Built-in rules, and the reports of each, by group.

-- Events in their order: by the time of the last report, then by id. A time over five minutes after the
-- acceptance of the event is that of the acceptance.
CREATE TABLE fact AS
SELECT row_number() OVER (ORDER BY at, id) AS seq, id, node, agent, chk, healthy, fatal, trusted, at,
       min(begun, at) AS first, count, earlier,
       iif(EXISTS (SELECT 1 FROM code WHERE code.id = e.id
                   AND code IN ('13', '31', '43', '45', '66', '68', '69', '94')), job, NULL) AS job
FROM (SELECT *, iif(last > accepted + 300000, accepted, last) AS at,
             iif(first > accepted + 300000, accepted, first) AS begun FROM event) AS e
WHERE NOT only_stored;
CREATE INDEX fact_of ON fact (id);

CREATE VIEW input AS SELECT * FROM fact WHERE agent <> 'health-events-analyzer';

-- Address and UUID of a GPU, as its monitor names them together. An event with one of them has the other one
-- too: that of the last pair before, or else of the first one after.
CREATE TABLE pair AS
SELECT DISTINCT e.node, accepted, p.value AS pci, u.value AS uuid
FROM event AS e JOIN entity AS p ON p.id = e.id AND p.kind = 'PCI' JOIN entity AS u ON u.id = e.id AND u.kind = 'GPU_UUID'
WHERE chk = 'GpuInventory' AND healthy AND trusted;
CREATE TABLE lacks AS
SELECT f.id, f.node, f.at, kind, value FROM fact AS f JOIN entity USING (id)
WHERE kind IN ('PCI', 'GPU_UUID')
  AND 1 = (SELECT count(*) FROM entity AS o WHERE o.id = f.id AND o.kind IN ('PCI', 'GPU_UUID'));
INSERT INTO entity
SELECT id, other, name FROM (
    SELECT l.id, iif(kind = 'PCI', 'GPU_UUID', 'PCI') AS other, iif(kind = 'PCI', uuid, pci) AS name,
           row_number() OVER (PARTITION BY l.id ORDER BY accepted > at,
                              iif(accepted > at, accepted, -accepted), iif(accepted > at, pci, NULL), pci DESC,
                              iif(accepted > at, uuid, NULL), uuid DESC) AS n
    FROM lacks AS l JOIN pair ON pair.node = l.node AND value = iif(kind = 'PCI', pci, uuid))
WHERE n = 1;

-- GPUs of an event, by the most durable kind of name that it has.
CREATE TABLE gpu AS
SELECT DISTINCT id, kind || ' ' || value AS gpu FROM entity AS e
WHERE kind = (SELECT kind FROM entity WHERE id = e.id AND kind IN ('GPU_UUID', 'PCI', 'GPU')
              ORDER BY kind = 'GPU', kind = 'PCI' LIMIT 1);
CREATE INDEX gpu_of ON gpu (id);

-- Rack and NVLink domain of an event.
CREATE TABLE place AS
SELECT id, what, key || ' ' || value AS place
FROM (SELECT id, what, key, value, row_number() OVER (PARTITION BY id, what ORDER BY rank) AS n
      FROM label JOIN topology USING (key))
WHERE n = 1;

CREATE VIEW xid AS
SELECT f.*, code, gpu FROM input AS f JOIN code USING (id) JOIN gpu USING (id)
WHERE chk = 'SysLogsXIDError' AND NOT healthy;

-- `lasts`: until a repair. `steps`: fault (F) or repair (R).
CREATE TABLE rule (
    name TEXT PRIMARY KEY, kind TEXT, window INT, threshold INT, lasts INT, gap INT, close INT, within INT,
    steps TEXT);
CREATE TABLE report (
    rule TEXT, grp TEXT, seq INT, at INT, first INT, count INT, value TEXT, job TEXT, earlier INT, node TEXT,
    gpu TEXT, place TEXT);

INSERT INTO rule VALUES
    ('MultipleRemediations', 'sequence', 168*3600000, 6, 1, NULL, NULL, 720*3600000, 'RRRRRF'),
    ('RepairNotWorking', 'sequence', 72*3600000, 5, 1, NULL, NULL, 24*3600000, 'FRFRF'),
    ('RepeatedXIDErrorOnSameGPU', 'burst', 24*3600000, 5, 1, 180000, NULL, NULL, NULL),
    ('RepeatedXID31OnSameGPU', 'burst', 24*3600000, 2, 1, 180000, NULL, NULL, NULL),
    ('RepeatedXID13OnSameGPCAndTPC', 'burst', 24*3600000, 2, 1, 15000, NULL, NULL, NULL),
    ('RepeatedXID31OnDifferentGPU', 'distinct', 24*3600000, 2, 0, NULL, NULL, NULL, NULL),
    ('RepeatedXID13OnDifferentGPCAndTPC', 'distinct', 24*3600000, 2, 0, NULL, NULL, NULL, NULL),
    ('RackFault', 'distinct', 600000, 3, 0, NULL, NULL, NULL, NULL),
    ('NVLinkDomainFault', 'distinct', 600000, 3, 0, NULL, NULL, NULL, NULL),
    ('XIDErrorSoloNoBurst', 'solo', 24*3600000, 1, 0, 180000, NULL, NULL, NULL),
    ('XID74Reg0SoloNVLinkError', 'solo', 24*3600000, 1, 1, 60000, NULL, NULL, NULL),
    ('XID74Reg0SignalIntegrityError', 'solo', 24*3600000, 1, 1, 60000, NULL, NULL, NULL),
    ('XID74Reg3UnexpectedError', 'solo', 24*3600000, 1, 1, 60000, NULL, NULL, NULL),
    ('XID74Reg3Bit18Set', 'solo', 24*3600000, 1, 1, 60000, NULL, NULL, NULL),
    ('XID74Reg2Bit13Set', 'count', 24*3600000, 1, 1, NULL, NULL, NULL, NULL),
    ('RepeatedXID74Reg0HardwareIssue', 'count', 24*3600000, 2, 1, NULL, NULL, NULL, NULL),
    ('XID74Reg0Bit27Or29Set', 'count', 24*3600000, 2, 1, NULL, NULL, NULL, NULL),
    ('RepeatedXID74Reg2Bit16Or19Set', 'count', 24*3600000, 2, 1, NULL, NULL, NULL, NULL),
    ('RepeatedXID74Reg2Bit17Or18Set', 'count', 24*3600000, 2, 1, NULL, NULL, NULL, NULL),
    ('XID74Reg0ECCParityError', 'count', 24*3600000, 2, 1, NULL, NULL, NULL, NULL),
    ('RepeatedXID74Reg2HardwareIssue', 'count', 24*3600000, 2, 1, NULL, NULL, NULL, NULL),
    ('XID74Reg4HardwareIssue', 'count', 24*3600000, 2, 1, NULL, NULL, NULL, NULL),
    ('XID74Reg4ECCError', 'count', 24*3600000, 2, 0, NULL, NULL, NULL, NULL),
    ('RepeatedNICDriverError', 'count', 3600000, 3, 1, NULL, NULL, NULL, NULL),
    ('RepeatedNICDegradation', 'count', 3600000, 3, 1, NULL, 300000, NULL, NULL),
    ('RepeatedApplicationXID', 'exclusive', 24*3600000, 3, 1, 300000, NULL, NULL, NULL),
    ('SilentGPU', 'silent', 3600000, 16, 0, 300000, NULL, NULL, NULL),
    ('NoisyGPU', 'noisy', 24*3600000, 20, 0, 300000, NULL, NULL, NULL);

INSERT INTO report
SELECT 'RepeatedXIDErrorOnSameGPU', node || ', ' || gpu || ', code ' || code, seq, at, first, count, code, job,
       earlier, node, gpu, NULL
FROM xid WHERE code <> '31';

INSERT INTO report
SELECT 'RepeatedXID31OnSameGPU', node || ', ' || gpu, seq, at, first, count, code, job, earlier, node, gpu, NULL
FROM xid WHERE code = '31';

INSERT INTO report
SELECT 'RepeatedXID31OnDifferentGPU', node, seq, at, first, count, gpu, job, earlier, node, NULL, NULL
FROM xid WHERE code = '31';

INSERT INTO report
SELECT 'RepeatedXID13OnSameGPCAndTPC', node || ', ' || gpu || ', GPC ' || c.value || ', TPC ' || t.value, seq, at,
       first, count, code, job, earlier, node, gpu, NULL
FROM xid JOIN entity AS c USING (id) JOIN entity AS t USING (id)
WHERE code = '13' AND c.kind = 'GPC' AND t.kind = 'TPC';

INSERT INTO report
SELECT 'RepeatedXID13OnDifferentGPCAndTPC', node || ', ' || gpu, seq, at, first, count,
       c.value || '/' || coalesce((SELECT value FROM entity WHERE id = xid.id AND kind = 'TPC'), ''), job, earlier,
       node, gpu, NULL
FROM xid JOIN entity AS c USING (id) WHERE code = '13' AND c.kind = 'GPC';

INSERT INTO report
SELECT 'XIDErrorSoloNoBurst', node || ', ' || gpu, seq, at, first, count, code, job, earlier, node, gpu, NULL
FROM xid WHERE code IN ('13', '31');

-- Bits of the registers of an XID 74: one of those of a rule is enough. Some rules are about a link.
CREATE TABLE bits (rule TEXT, by_link INT, register TEXT, number INT);
INSERT INTO bits VALUES
    ('XID74Reg0SoloNVLinkError', 0, 'REG0', 1), ('XID74Reg0SoloNVLinkError', 0, 'REG0', 20),
    ('XID74Reg0SignalIntegrityError', 0, 'REG0', 21), ('XID74Reg0SignalIntegrityError', 0, 'REG0', 22),
    ('XID74Reg3UnexpectedError', 0, 'REG3', 16), ('XID74Reg3UnexpectedError', 0, 'REG3', 17),
    ('XID74Reg3Bit18Set', 0, 'REG3', 18),
    ('XID74Reg2Bit13Set', 0, 'REG2', 13),
    ('RepeatedXID74Reg0HardwareIssue', 0, 'REG0', 8), ('RepeatedXID74Reg0HardwareIssue', 0, 'REG0', 9),
    ('RepeatedXID74Reg0HardwareIssue', 0, 'REG0', 12), ('RepeatedXID74Reg0HardwareIssue', 0, 'REG0', 16),
    ('RepeatedXID74Reg0HardwareIssue', 0, 'REG0', 17), ('RepeatedXID74Reg0HardwareIssue', 0, 'REG0', 24),
    ('RepeatedXID74Reg0HardwareIssue', 0, 'REG0', 28),
    ('XID74Reg0Bit27Or29Set', 0, 'REG0', 27), ('XID74Reg0Bit27Or29Set', 0, 'REG0', 29),
    ('RepeatedXID74Reg2Bit16Or19Set', 0, 'REG2', 16), ('RepeatedXID74Reg2Bit16Or19Set', 0, 'REG2', 19),
    ('RepeatedXID74Reg2Bit17Or18Set', 0, 'REG2', 17), ('RepeatedXID74Reg2Bit17Or18Set', 0, 'REG2', 18),
    ('XID74Reg0ECCParityError', 1, 'REG0', 4), ('XID74Reg0ECCParityError', 1, 'REG0', 5),
    ('RepeatedXID74Reg2HardwareIssue', 1, 'REG2', 0), ('RepeatedXID74Reg2HardwareIssue', 1, 'REG2', 1),
    ('RepeatedXID74Reg2HardwareIssue', 1, 'REG2', 2), ('RepeatedXID74Reg2HardwareIssue', 1, 'REG2', 6),
    ('XID74Reg4HardwareIssue', 1, 'REG4', 18), ('XID74Reg4HardwareIssue', 1, 'REG4', 19),
    ('XID74Reg4HardwareIssue', 1, 'REG4', 21), ('XID74Reg4HardwareIssue', 1, 'REG4', 22),
    ('XID74Reg4HardwareIssue', 1, 'REG4', 24), ('XID74Reg4HardwareIssue', 1, 'REG4', 25),
    ('XID74Reg4HardwareIssue', 1, 'REG4', 27), ('XID74Reg4HardwareIssue', 1, 'REG4', 28),
    ('XID74Reg4ECCError', 1, 'REG4', 20), ('XID74Reg4ECCError', 1, 'REG4', 23),
    ('XID74Reg4ECCError', 1, 'REG4', 26), ('XID74Reg4ECCError', 1, 'REG4', 29);

INSERT INTO report
SELECT DISTINCT rule, node || ', ' || gpu || iif(by_link, ', NVLINK ' || l.value, ''), seq, at, first, count, code,
       job, earlier, node, gpu, NULL
FROM xid JOIN entity AS r USING (id)
JOIN bits ON register = r.kind AND substr(r.value, -1 - number, 1) = '1'
LEFT JOIN entity AS l ON l.id = xid.id AND l.kind = 'NVLINK'
WHERE code = '74' AND (l.value IS NOT NULL OR NOT by_link);

INSERT INTO report
SELECT 'RepeatedNICDriverError', node || ', code ' || code, seq, at, first, count, code, job, earlier, node, NULL, NULL
FROM input JOIN code USING (id)
WHERE agent = 'syslog-health-monitor' AND chk = 'SysLogsNICDriverError' AND NOT healthy AND NOT fatal
  AND code IN ('netdev_watchdog', 'port_module_high_temp', 'pci_power_insufficient', 'module_unplugged');

INSERT INTO report
SELECT 'RepeatedNICDegradation', node || ', NIC ' || n.value || ', NICPort ' || p.value, seq, at, first, count, '', job,
       earlier, node, NULL, NULL
FROM input JOIN entity AS n USING (id) JOIN entity AS p USING (id)
WHERE agent = 'nic-health-monitor' AND chk IN ('InfiniBandDegradationCheck', 'EthernetDegradationCheck')
  AND NOT healthy AND NOT fatal AND n.kind = 'NIC' AND p.kind = 'NICPort';

INSERT INTO report
SELECT 'RepeatedApplicationXID', node || ', ' || gpu, seq, at, first, count, job, job, earlier, node, gpu, NULL
FROM xid WHERE job IS NOT NULL;

-- A fault is a check, a code and a device with its part. A repair of the node is one of all its faults.
INSERT INTO report
SELECT 'RepairNotWorking', node || ', ' || agent || '/' || chk || ' ' || code ||
       coalesce((SELECT ' ' || group_concat(kind || ' ' || value, ' ' ORDER BY kind, value) FROM entity
                 WHERE id = f.id AND kind IN ('GPU_UUID', 'PCI', 'GPU', 'NIC', 'NVLINK', 'NICPort')), ''),
       seq, at, first, count, 'F', job, earlier, node,
       coalesce((SELECT gpu FROM gpu WHERE id = f.id), ''), NULL
FROM input AS f JOIN code USING (id) WHERE NOT healthy AND fatal AND code <> 'VALIDATION_FAILED';
INSERT INTO report
SELECT DISTINCT rule, grp, f.seq, f.at, f.first, f.count, 'R', NULL, f.earlier, f.node, gpu, NULL
FROM report AS r JOIN input AS f USING (node)
WHERE rule = 'RepairNotWorking' AND f.healthy AND f.chk = 'NodeRepaired';

INSERT INTO report
SELECT 'MultipleRemediations', node, seq, at, first, count, iif(healthy, 'R', 'F'), job, earlier, node, NULL, NULL
FROM input WHERE iif(healthy, chk = 'NodeRepaired', fatal);

INSERT INTO report
SELECT iif(what = 'rack', 'RackFault', 'NVLinkDomainFault'), place, seq, at, first, count, node, job, earlier, node,
       NULL, place
FROM input JOIN place USING (id) WHERE NOT healthy AND fatal;

-- Without a second code, an XID is of one GPU of a domain.
INSERT INTO report
SELECT 'SilentGPU', place, seq, at, first, count, node || ', ' || gpu, job, earlier, node, NULL, place
FROM xid JOIN place USING (id) WHERE what = 'domain';
INSERT INTO report
SELECT 'NoisyGPU', place, seq, at, first, count, node || ', ' || gpu, job, earlier, node, NULL, place
FROM xid JOIN place USING (id)
WHERE what = 'domain' AND code NOT IN ('13', '31', '43', '45', '66', '68', '69', '94');

CREATE INDEX report_of ON report (rule, grp, seq);
