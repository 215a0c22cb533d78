-- Conclusions that are open at the time of the clock.

-- Repairs of a group, which a person or gpuwarden reports: the event names the group, or nothing of its kind.
CREATE TABLE repair AS
SELECT DISTINCT rule, grp, f.seq, f.at, f.node
FROM report AS r JOIN fact AS f ON f.agent = 'health-events-analyzer' AND f.chk = r.rule AND f.healthy AND f.trusted
WHERE iif(r.place IS NULL, f.node = r.node, EXISTS (SELECT 1 FROM place WHERE id = f.id AND place = r.place))
  AND (r.gpu IS NULL OR NOT EXISTS (SELECT 1 FROM gpu WHERE id = f.id)
       OR EXISTS (SELECT 1 FROM gpu WHERE id = f.id AND gpu = r.gpu)
       -- Of a fault, one of its names is enough.
       OR r.rule = 'RepairNotWorking' AND EXISTS (
           SELECT 1 FROM fact AS o JOIN entity AS a ON a.id = o.id JOIN entity AS b USING (kind, value)
           WHERE o.seq = r.seq AND kind IN ('PCI', 'GPU_UUID') AND b.id = f.id));

-- What counts may begin anew with each repair.
CREATE TABLE era AS
SELECT DISTINCT rule, grp, 0 AS begin FROM report UNION SELECT rule, grp, seq FROM repair;

-- Number that a group needs: half of the nodes of a rack or domain.
CREATE TABLE size AS
SELECT what, place, count(*) AS nodes
FROM (SELECT what, key || ' ' || value AS place, row_number() OVER (PARTITION BY node, what ORDER BY rank) AS n
      FROM cluster JOIN topology USING (key))
WHERE n = 1 GROUP BY what, place;
CREATE VIEW needed AS
SELECT DISTINCT rule, grp, max(threshold, min(100, coalesce((
    SELECT (nodes * 50 + 99) / 100 FROM size
    WHERE size.place = grp AND what = iif(rule = 'RackFault', 'rack', 'domain')
      AND rule IN ('RackFault', 'NVLinkDomainFault')), 0))) AS threshold
FROM report JOIN rule ON name = rule;

-- Reports with which a condition is met, where reports count from `begin` on. `judged` is the time after which
-- that is known.
CREATE TABLE met (rule TEXT, grp TEXT, begin INT, seq INT, judged INT);

-- Reports of a job count once, and an event for no more reports than are needed.
INSERT INTO met
SELECT r.rule, r.grp, begin, r.seq, NULL
FROM report AS r JOIN rule ON name = r.rule JOIN era ON era.rule = r.rule AND era.grp = r.grp AND r.seq > begin
WHERE kind = 'count' AND NOT r.earlier
  AND threshold <= (
    SELECT coalesce(sum(iif(p.job IS NULL, min(p.count, threshold), 0)), 0) + count(DISTINCT p.job) FROM report AS p
    WHERE p.rule = r.rule AND p.grp = r.grp AND p.seq > begin AND p.seq <= r.seq AND p.at >= r.at - window)
  AND (close IS NULL OR EXISTS (
    -- Of the newest reports that are needed, one is several, or two are close to each other.
    SELECT 1 FROM report AS p JOIN report AS q ON q.rule = p.rule AND q.grp = p.grp AND q.seq <= p.seq
    WHERE p.rule = r.rule AND p.grp = r.grp AND q.seq > begin AND p.seq <= r.seq AND q.at >= r.at - window
      AND (q.seq < p.seq AND q.at >= p.at - close OR q.seq = p.seq AND p.count > 1)
      AND threshold > (SELECT coalesce(sum(min(n.count, threshold)), 0) FROM report AS n
                       WHERE n.rule = r.rule AND n.grp = r.grp AND n.seq > q.seq AND n.seq <= r.seq)));

INSERT INTO met
SELECT r.rule, r.grp, begin, r.seq, NULL
FROM report AS r JOIN rule ON name = r.rule JOIN era ON era.rule = r.rule AND era.grp = r.grp AND r.seq > begin
JOIN needed ON needed.rule = r.rule AND needed.grp = r.grp
WHERE kind = 'distinct' AND NOT r.earlier
  AND needed.threshold <= (
    SELECT count(DISTINCT p.value) FROM report AS p
    WHERE p.rule = r.rule AND p.grp = r.grp AND p.seq > begin AND p.seq <= r.seq AND p.at >= r.at - window);

-- A burst goes on with a report within the gap, or within three hours for codes whose faults last. The time of a
-- burst is that of its last report, its job that of the first.
CREATE TABLE bursts AS
WITH gaps AS (
    SELECT r.*, begin, gap, window, threshold, value IN ('74', '79', '95', '109', '119') AS lasting,
           lag(at) OVER w AS before,
           max(iif(value IN ('74', '79', '95', '109', '119'), at, NULL))
               OVER (PARTITION BY r.rule, r.grp, begin ORDER BY seq ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
               AS before_lasting
    FROM report AS r JOIN rule ON name = r.rule JOIN era ON era.rule = r.rule AND era.grp = r.grp AND seq > begin
    WHERE kind = 'burst' WINDOW w AS (PARTITION BY r.rule, r.grp, begin ORDER BY seq)),
numbered AS (
    SELECT *, sum(NOT (coalesce(first - before <= gap, 0) OR lasting AND coalesce(first - before_lasting <= 10800000, 0)))
        OVER (PARTITION BY rule, grp, begin ORDER BY seq) AS burst
    FROM gaps)
SELECT *, first_value(job) OVER (PARTITION BY rule, grp, begin, burst ORDER BY seq) AS of_job FROM numbered;
CREATE INDEX bursts_of ON bursts (rule, grp, begin, seq);
INSERT INTO met
SELECT rule, grp, begin, seq, NULL FROM bursts AS r
WHERE NOT earlier AND threshold <= (
    SELECT coalesce(sum(of_job IS NULL), 0) + count(DISTINCT of_job) FROM (
        SELECT of_job FROM bursts AS p
        WHERE p.rule = r.rule AND p.grp = r.grp AND p.begin = r.begin AND p.seq <= r.seq
        GROUP BY burst HAVING max(at) >= r.at - window));

INSERT INTO met
WITH RECURSIVE chain (rule, grp, begin, step, seq, at, since) AS (
    SELECT r.rule, r.grp, begin, 1, seq, at, at
    FROM report AS r JOIN rule ON name = r.rule JOIN era ON era.rule = r.rule AND era.grp = r.grp AND seq > begin
    WHERE kind = 'sequence' AND value = substr(steps, 1, 1)
    UNION
    SELECT c.rule, c.grp, begin, step + 1, r.seq, r.at, since
    FROM chain AS c JOIN rule ON name = c.rule
    JOIN report AS r ON r.rule = c.rule AND r.grp = c.grp AND r.seq > c.seq AND value = substr(steps, step + 1, 1)
    WHERE r.at <= c.at + within AND r.at <= since + window)
SELECT DISTINCT c.rule, c.grp, begin, c.seq, NULL
FROM chain AS c JOIN rule ON name = c.rule JOIN report AS r ON r.rule = c.rule AND r.grp = c.grp AND r.seq = c.seq
WHERE step = length(steps) AND NOT earlier;

-- A report stands alone if no other is near, none of another fault of the GPU follows, and none is open.
CREATE TABLE other AS
SELECT DISTINCT r.rule, r.grp, f.seq, f.at, f.healthy, f.agent, f.chk, code
FROM (SELECT DISTINCT rule, grp, node, gpu FROM report JOIN rule ON name = rule WHERE kind = 'solo') AS r
JOIN input AS f USING (node) LEFT JOIN code USING (id)
WHERE (EXISTS (SELECT 1 FROM gpu WHERE id = f.id AND gpu = r.gpu)
       OR f.healthy AND NOT EXISTS (SELECT 1 FROM gpu WHERE id = f.id))
  AND NOT EXISTS (SELECT 1 FROM report AS o WHERE o.rule = r.rule AND o.grp = r.grp AND o.seq = f.seq);
CREATE INDEX other_of ON other (rule, grp, seq);
INSERT INTO met
SELECT r.rule, r.grp, begin, r.seq, r.at + gap
FROM report AS r JOIN rule ON name = r.rule JOIN era ON era.rule = r.rule AND era.grp = r.grp AND r.seq > begin
WHERE kind = 'solo' AND NOT r.earlier AND r.count = 1
  AND NOT EXISTS (
    SELECT 1 FROM report AS p WHERE p.rule = r.rule AND p.grp = r.grp AND p.seq > begin
      AND (p.seq < r.seq AND p.at >= r.first - gap OR p.seq > r.seq AND p.at <= r.at + gap))
  AND NOT EXISTS (
    SELECT 1 FROM other AS o WHERE o.rule = r.rule AND o.grp = r.grp AND NOT healthy
      AND o.seq > r.seq AND o.at <= r.at + gap)
  AND NOT EXISTS (
    SELECT 1 FROM other AS o WHERE o.rule = r.rule AND o.grp = r.grp AND NOT healthy
      AND o.seq > begin AND o.seq < r.seq AND o.at >= r.at - window
      AND NOT EXISTS (
        SELECT 1 FROM other AS h WHERE h.rule = o.rule AND h.grp = o.grp AND h.healthy AND h.seq > o.seq
          AND h.seq < r.seq AND h.agent = o.agent AND h.chk = o.chk AND coalesce(h.code, o.code) = o.code));
CREATE INDEX met_of ON met (rule, grp, begin, seq);

-- Report with which a row of them ends: none follows within the window.
CREATE TABLE stop AS
WITH pause AS (
    SELECT r.*, lasts, window, lead(at) OVER (PARTITION BY rule, grp ORDER BY seq) AS next
    FROM report AS r JOIN rule ON name = r.rule)
SELECT rule, grp, seq, at, node, place, lasts, window,
       min(iif(next <= at + window, NULL, seq)) OVER w AS stop, min(iif(next <= at + window, NULL, at)) OVER w AS stopped
FROM pause
WINDOW w AS (PARTITION BY rule, grp ORDER BY seq ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING);

-- A conclusion, were it drawn with this report: the repair that ends it, if one does.
CREATE TABLE drawn AS
SELECT met.*, at, node, place, lasts, window, stop, stopped, (
    SELECT min(p.seq) FROM repair AS p
    WHERE p.rule = met.rule AND p.grp = met.grp AND p.seq > met.seq AND (judged IS NULL OR p.at > judged)
      AND (lasts OR p.at <= stopped + window)) AS repaired
FROM met JOIN stop USING (rule, grp, seq);

-- Conclusions one after the other. A repair begins anew, the end of the window does not.
CREATE TABLE conclusion AS
WITH RECURSIVE next AS (
    SELECT *, coalesce(repaired, begin) AS next_begin,
           iif(repaired IS NULL AND lasts, NULL, coalesce(repaired, stop)) AS after
    FROM drawn),
run (rule, grp, begin, seq) AS (
    SELECT rule, grp, 0, min(seq) FROM met WHERE begin = 0 GROUP BY rule, grp
    UNION ALL
    SELECT n.rule, n.grp, next_begin, (
        SELECT min(m.seq) FROM met AS m
        WHERE m.rule = n.rule AND m.grp = n.grp AND m.begin = next_begin AND m.seq > after)
    FROM run JOIN next AS n ON n.rule = run.rule AND n.grp = run.grp AND n.begin = run.begin AND n.seq = run.seq
    WHERE after IS NOT NULL)
SELECT drawn.* FROM run JOIN drawn USING (rule, grp, begin, seq);

CREATE TABLE open (rule TEXT, grp TEXT, since INT, about TEXT);
INSERT INTO open
SELECT rule, grp, at, iif(place IS NULL, '', node) FROM conclusion JOIN clock
WHERE repaired IS NULL AND (lasts OR stopped >= now - window) AND (judged IS NULL OR judged < now);

-- Jobs since the last repair that no other GPU has in the same part of time, or in the one before or after.
INSERT INTO open
WITH since AS (
    SELECT r.*, name, window, threshold, gap FROM report AS r JOIN rule ON name = r.rule
    WHERE kind = 'exclusive'
      AND seq > coalesce((SELECT max(seq) FROM repair WHERE rule = r.rule AND grp = r.grp), 0)),
pauses AS (
    SELECT *, coalesce(at - lag(at) OVER (PARTITION BY grp, job ORDER BY seq) > window, 1) AS is_new FROM since),
spans AS (
    SELECT *, sum(is_new) OVER (PARTITION BY grp, job ORDER BY seq) AS span FROM pauses),
of_job AS (
    SELECT rule, grp, job, window, threshold, gap, min(seq) AS seq, min(at) AS begun, max(at) AS last, max(is_new AND earlier) AS earlier
    FROM spans GROUP BY grp, job, span),
own AS (
    SELECT * FROM of_job AS o WHERE NOT EXISTS (
        SELECT 1 FROM report AS p
        WHERE p.rule = o.rule AND p.job = o.job AND p.grp <> o.grp
          AND p.at / window BETWEEN begun / window - 1 AND last / window + 1))
SELECT rule, grp, begun, '' FROM own AS o JOIN clock
WHERE begun + gap < now AND NOT earlier AND threshold <= (
    SELECT count(*) FROM own AS p WHERE p.grp = o.grp AND p.seq <= o.seq AND p.last >= o.begun - window)
GROUP BY grp HAVING seq = min(seq);

-- GPUs that a node has since its last boot, by the newest event that names each.
CREATE TABLE present AS
WITH named AS (
    SELECT e.node, e.boot, accepted, p.value AS pci, u.value AS uuid,
           row_number() OVER (PARTITION BY e.node, u.value ORDER BY accepted DESC, boot DESC) AS n
    FROM event AS e JOIN entity AS u ON u.id = e.id AND u.kind = 'GPU_UUID'
    LEFT JOIN entity AS p ON p.id = e.id AND p.kind = 'PCI'
    WHERE chk = 'GpuInventory' AND healthy AND trusted)
SELECT node, node || ', GPU_UUID ' || uuid AS member FROM named AS one
WHERE n = 1 AND boot = (SELECT boot FROM named WHERE node = one.node AND n = 1 ORDER BY accepted DESC, boot DESC LIMIT 1);

-- GPUs that report, each without a pause longer than the window since its begin. A repair forgets those of its node.
CREATE TABLE spoke AS
WITH since AS (
    SELECT r.*, window, gap, threshold FROM report AS r JOIN rule ON name = r.rule
    WHERE kind = 'silent' AND seq > coalesce((
        SELECT max(p.seq) FROM repair AS p WHERE p.rule = r.rule AND p.grp = r.grp AND p.node = r.node), 0)),
pauses AS (
    SELECT *, coalesce(at - lag(at) OVER (PARTITION BY grp, value ORDER BY seq) > window, 1) AS is_new FROM since),
spans AS (
    SELECT *, sum(is_new) OVER (PARTITION BY grp, value ORDER BY seq DESC) AS later FROM pauses)
SELECT s.rule, s.grp, s.node, value AS member, min(s.at) AS begun, window, gap, threshold, latest
FROM spans AS s
JOIN (SELECT rule, grp, max(at) AS latest FROM report GROUP BY rule, grp) USING (rule, grp)
-- Of the newest span only: those before it have at least its begin behind them.
WHERE later - is_new = 0
GROUP BY s.grp, value HAVING max(s.at) >= latest - window;
INSERT INTO open
SELECT rule, grp, max(begun), (
    SELECT min(member) FROM present
    WHERE node IN (SELECT node FROM spoke WHERE grp = s.grp) AND member NOT IN (SELECT member FROM spoke WHERE grp = s.grp))
FROM spoke AS s JOIN clock
GROUP BY grp
HAVING count(*) >= threshold AND max(begun) + gap < now AND latest >= now - window AND 1 = (
    SELECT count(*) FROM present
    WHERE node IN (SELECT node FROM spoke WHERE grp = s.grp) AND member NOT IN (SELECT member FROM spoke WHERE grp = s.grp));

-- Reports of each GPU as of each report, in parts of two hours, and the median of the others that report.
CREATE TABLE noise AS
WITH own AS (
    SELECT r.*, at / 7200000 AS part, iif(job IS NULL, count, 1) AS reports FROM report AS r WHERE rule = 'NoisyGPU'),
members AS (SELECT DISTINCT rule, grp, node, value AS member FROM own),
cut AS (
    SELECT t.seq, t.at, t.part, t.earlier, m.*, coalesce((
        SELECT max(p.seq) FROM repair AS p
        WHERE p.rule = m.rule AND p.grp = m.grp AND p.node = m.node AND p.seq < t.seq), 0) AS begin
    FROM own AS t JOIN members AS m USING (grp))
SELECT cut.*, (SELECT coalesce(sum(o.reports), 0) FROM own AS o
               WHERE o.grp = cut.grp AND o.value = member AND o.seq > begin AND o.seq <= cut.seq
                 AND o.part > cut.part - 12) AS sum
FROM cut;
CREATE INDEX noise_of ON noise (grp, seq);
CREATE TABLE far AS
SELECT n.*, sum >= 20 AND (SELECT count(*) FROM noise AS o WHERE o.grp = n.grp AND o.seq = n.seq AND o.sum > 0) > 8
    AND sum >= 10 * (
        SELECT min(o.sum) FROM noise AS o
        WHERE o.grp = n.grp AND o.seq = n.seq AND o.sum > 0 AND o.member <> n.member AND (
            SELECT sum(p.sum <= o.sum) > count(*) / 2 FROM noise AS p
            WHERE p.grp = n.grp AND p.seq = n.seq AND p.sum > 0 AND p.member <> n.member)) AS is_far
FROM noise AS n;
INSERT INTO open
WITH since AS (
    SELECT f.rule, f.grp, f.member, min(f.at) AS at FROM far AS f
    WHERE is_far AND NOT earlier
      AND seq > coalesce((SELECT max(o.seq) FROM far AS o
                          WHERE o.grp = f.grp AND o.member = f.member AND NOT coalesce(o.is_far, 0)), 0)
      AND seq > coalesce((SELECT max(p.seq) FROM repair AS p
                          WHERE p.rule = f.rule AND p.grp = f.grp AND p.node = f.node), 0)
    GROUP BY f.grp, f.member),
ranked AS (
    SELECT *, row_number() OVER (PARTITION BY grp ORDER BY at, member) AS n,
           (SELECT max(r.at) FROM report AS r WHERE r.rule = since.rule AND r.grp = since.grp) AS latest
    FROM since)
SELECT rule, grp, at, member FROM ranked JOIN clock
WHERE n = 1 AND at + 300000 < now AND latest >= now - 24 * 3600000;
