-- Events as their sender and the store know them. Times are in milliseconds.
CREATE TABLE event (
    id TEXT PRIMARY KEY, node TEXT, agent TEXT, chk TEXT, healthy INT, fatal INT, only_stored INT,
    trusted INT, accepted INT, first INT, last INT, count INT, job TEXT, earlier INT, boot TEXT);
CREATE TABLE code (id TEXT, code TEXT);
CREATE TABLE entity (id TEXT, kind TEXT, value TEXT);
CREATE TABLE label (id TEXT, key TEXT, value TEXT);
CREATE INDEX code_of ON code (id);
CREATE INDEX entity_of ON entity (id, kind);
CREATE INDEX label_of ON label (id);
-- Labels of all nodes, and the time at which the conclusions are asked for.
CREATE TABLE cluster (node TEXT, key TEXT, value TEXT);
CREATE TABLE clock (now INT);

-- Labels that say where a node is; the first one that there is counts.
CREATE TABLE topology (what TEXT, rank INT, key TEXT);
INSERT INTO topology VALUES
    ('rack', 1, 'topology.kubernetes.io/rack'),
    ('rack', 2, 'network.topology.nvidia.com/leaf'),
    ('rack', 3, 'chassis_serial'),
    ('domain', 1, 'nvidia.com/gpu.clique'),
    ('domain', 2, 'network.topology.nvidia.com/accelerator'),
    ('domain', 3, 'chassis_serial');
