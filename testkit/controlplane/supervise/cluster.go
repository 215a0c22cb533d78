package main

import (
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"
)

// Time limits of start-up: generous, for a machine that is busy with a build.
const (
	readyLimit   = 240 * time.Second
	accountLimit = 60 * time.Second
)

//go:embed stages.yaml
var stages []byte

type cluster struct {
	opts     options
	server   string
	ca       *authority
	programs []*program
	exits    chan error // programs that ended by themselves
	ports    net.Listener

	mu       sync.Mutex
	stopping bool
}

func newCluster(opts options) (*cluster, error) {
	claim, base, err := claimPorts()
	if err != nil {
		return nil, err
	}
	for _, dir := range []string{"log", "pki"} {
		if err := os.MkdirAll(filepath.Join(opts.dir, dir), 0o755); err != nil {
			return nil, err
		}
	}
	server := fmt.Sprintf("https://127.0.0.1:%d", base)
	ca, err := makePKI(filepath.Join(opts.dir, "pki"), server)
	if err != nil {
		return nil, err
	}
	c := &cluster{opts: opts, server: server, ca: ca, exits: make(chan error, 16), ports: claim}
	if err := c.plan(base); err != nil {
		return nil, err
	}
	return c, nil
}

// portBlock ports in a row belong to one control plane.
const portBlock = 8

// claimPorts finds a block of free ports below the range from which the kernel
// hands out ports by itself. An abstract Unix socket named after the block keeps
// other supervisors off it, and is gone when this process is.
func claimPorts() (net.Listener, int, error) {
	const first, blocks = 20000, 1500
	for _, block := range rand.Perm(blocks) {
		base := first + block*portBlock
		claim, err := net.Listen("unix", "@gpuwarden-testkit-ports-"+strconv.Itoa(base))
		if err != nil {
			continue
		}
		if portsFree(base) {
			return claim, base, nil
		}
		claim.Close()
	}
	return nil, 0, fmt.Errorf("no %d free ports in a row between %d and %d", portBlock, first, first+blocks*portBlock)
}

func portsFree(base int) bool {
	for port := base; port < base+portBlock; port++ {
		listener, err := net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(port))
		if err != nil {
			return false
		}
		listener.Close()
	}
	return true
}

// plan lists the programs in the order in which they start.
func (c *cluster) plan(base int) error {
	pki := func(name string) string { return filepath.Join(c.opts.dir, "pki", name) }
	port := func(n int) string { return strconv.Itoa(base + n) }
	etcd, peer := "http://127.0.0.1:"+port(1), "http://127.0.0.1:"+port(2)

	add := func(name, path string, args ...string) {
		c.programs = append(c.programs, &program{
			name: name,
			path: path,
			args: append(args, c.opts.extra[name]...),
			log:  filepath.Join(c.opts.dir, "log", name+".log"),
		})
	}
	asset := func(name string) string { return filepath.Join(c.opts.assets, name) }

	add("etcd", asset("etcd"),
		"--data-dir="+filepath.Join(c.opts.dir, "etcd"),
		"--listen-client-urls="+etcd, "--advertise-client-urls="+etcd,
		"--listen-peer-urls="+peer, "--initial-advertise-peer-urls="+peer, "--initial-cluster=default="+peer,
		"--log-level=warn", fmt.Sprintf("--unsafe-no-fsync=%t", !c.opts.fsync))
	add("kube-apiserver", asset("kube-apiserver"),
		"--etcd-servers="+etcd, "--bind-address=127.0.0.1", "--secure-port="+port(0),
		// A loopback address may not be an endpoint: leave the Service "kubernetes" without one.
		"--endpoint-reconciler-type=none", "--service-cluster-ip-range=10.0.0.0/16",
		"--tls-cert-file="+pki("apiserver.crt"), "--tls-private-key-file="+pki("apiserver.key"),
		"--client-ca-file="+pki("ca.crt"), "--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-signing-key-file="+pki("sa.key"), "--service-account-key-file="+pki("sa.pub"),
		"--requestheader-client-ca-file="+pki("ca.crt"), "--requestheader-allowed-names=front-proxy",
		"--requestheader-username-headers=X-Remote-User", "--requestheader-group-headers=X-Remote-Group",
		"--requestheader-extra-headers-prefix=X-Remote-Extra-",
		"--proxy-client-cert-file="+pki("front-proxy.crt"), "--proxy-client-key-file="+pki("front-proxy.key"),
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
		"--anonymous-auth=true", // readyz without credentials
		"--allow-privileged=true",
		// Counts every call by user agent, verb and resource.
		"--audit-policy-file="+pki("audit.yaml"), "--audit-log-path="+filepath.Join(c.opts.dir, "log", "audit.json"),
		"--audit-log-maxsize=500", "--audit-log-maxbackup=1")
	if _, err := os.Stat(asset("kube-controller-manager")); err != nil {
		// Nobody makes the accounts without which pods would be refused.
		apiserver := c.find("kube-apiserver")
		apiserver.args = append(apiserver.args, "--disable-admission-plugins=ServiceAccount")
	} else {
		add("kube-controller-manager", asset("kube-controller-manager"),
			"--kubeconfig="+pki("controller-manager.kubeconfig"),
			"--authentication-kubeconfig="+pki("controller-manager.kubeconfig"),
			"--authorization-kubeconfig="+pki("controller-manager.kubeconfig"),
			"--bind-address=127.0.0.1", "--secure-port="+port(3),
			"--leader-elect=false", "--use-service-account-credentials=true", "--allocate-node-cidrs=false",
			"--root-ca-file="+pki("ca.crt"), "--service-account-private-key-file="+pki("sa.key"),
			"--cluster-signing-cert-file="+pki("ca.crt"), "--cluster-signing-key-file="+pki("ca.key"))
	}
	if _, err := os.Stat(asset("kube-scheduler")); err == nil {
		add("kube-scheduler", asset("kube-scheduler"),
			"--kubeconfig="+pki("scheduler.kubeconfig"),
			"--authentication-kubeconfig="+pki("scheduler.kubeconfig"),
			"--authorization-kubeconfig="+pki("scheduler.kubeconfig"),
			"--bind-address=127.0.0.1", "--secure-port="+port(4), "--leader-elect=false")
	}
	if c.opts.kwok != "" {
		config := filepath.Join(c.opts.dir, "stages.yaml")
		if err := os.WriteFile(config, stages, 0o644); err != nil {
			return err
		}
		add("kwok", c.opts.kwok,
			"-v", "WARN", // at INFO, one line for each lease that it renews
			"--config="+config, "--kubeconfig="+pki("kwok.kubeconfig"),
			"--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
			"--node-lease-duration-seconds=40", "--cidr=10.100.0.0/16", "--node-ip=127.0.0.1",
			"--server-address=127.0.0.1:"+port(5))
	}
	for name := range c.opts.extra {
		if c.find(name) == nil {
			return fmt.Errorf("--arg for %q, which does not run here", name)
		}
	}
	return nil
}

func (c *cluster) startAll() error {
	for _, program := range c.programs {
		if err := c.start(program); err != nil {
			return err
		}
		if program.name == "kube-apiserver" {
			if err := c.ca.waitFor(c.server, "/readyz", nil, readyLimit); err != nil {
				return fmt.Errorf("%w%s", err, program.lastWords())
			}
		}
	}
	if c.find("kube-controller-manager") == nil {
		return nil
	}
	// Pods are refused until the controller manager has made this account.
	admin, err := loadKeyPair(filepath.Join(c.opts.dir, "pki"), "admin")
	if err != nil {
		return err
	}
	return c.ca.waitFor(c.server, "/api/v1/namespaces/default/serviceaccounts/default", admin, accountLimit)
}

// start refuses once the end has begun: a program that came up then would be left.
func (c *cluster) start(program *program) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stopping {
		return errors.New("told to end while starting")
	}
	return program.start(c.exits)
}

func (c *cluster) find(name string) *program {
	for _, program := range c.programs {
		if program.name == name {
			return program
		}
	}
	return nil
}

func (c *cluster) names() []string {
	names := []string{}
	for _, program := range c.programs {
		names = append(names, program.name)
	}
	return names
}

func (c *cluster) state() state {
	pids := map[string]int{}
	for _, program := range c.programs {
		if pid := program.pid(); pid != 0 {
			pids[program.name] = pid
		}
	}
	return state{
		Dir:        c.opts.dir,
		Server:     c.server,
		Kubeconfig: filepath.Join(c.opts.dir, "pki", "admin.kubeconfig"),
		Supervisor: os.Getpid(),
		Pids:       pids,
	}
}

// writeState replaces state.json in one step: a reader sees all of it or none.
func (c *cluster) writeState() error {
	text, err := json.Marshal(c.state())
	if err != nil {
		return err
	}
	path := filepath.Join(c.opts.dir, "state.json")
	if err := os.WriteFile(path+".new", text, 0o644); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// stopAll kills: a throw-away control plane needs no orderly end, and the
// apiserver's takes many seconds.
func (c *cluster) stopAll() {
	c.mu.Lock()
	c.stopping = true
	c.mu.Unlock()
	for i := len(c.programs) - 1; i >= 0; i-- {
		_ = c.programs[i].kill()
	}
	_ = os.Remove(filepath.Join(c.opts.dir, "state.json"))
	switch {
	case c.opts.remove:
		_ = os.RemoveAll(c.opts.dir)
	case c.opts.hold != "":
		// Nobody will need the data again. The logs may explain a failure.
		_ = os.RemoveAll(filepath.Join(c.opts.dir, "etcd"))
	}
}
