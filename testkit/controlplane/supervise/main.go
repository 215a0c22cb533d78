// Command supervise makes a Kubernetes control plane below a directory and keeps
// its programs as separate child processes, so that a test can stop or kill any
// one of them. It needs only the standard library: it builds in a second, also
// where the programs come from somewhere else.
//
// It ends, and takes its children with it, by one of three rules:
//
//   - default: when its standard input closes. Whoever holds the other end may
//     write commands (see control.go); that it was killed is enough to clean up.
//   - --hold FILE: when nobody has held a shared lock on FILE for --linger.
//   - --detach: when it gets SIGTERM, as it does in the other two cases as well.
//
// Once everything is ready it writes the state file; a reader that finds it and
// finds DIR/supervise.lock locked may use the control plane.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

type options struct {
	assets, dir, hold, kwok string
	linger                  time.Duration
	detach, fsync, remove   bool
	extra                   extraArgs
}

// extraArgs are flags for one program each, given as --arg PROGRAM=FLAG.
type extraArgs map[string][]string

func (e extraArgs) String() string { return "" }

func (e extraArgs) Set(value string) error {
	program, arg, ok := strings.Cut(value, "=")
	if !ok || !strings.HasPrefix(arg, "-") {
		return fmt.Errorf("want PROGRAM=--flag, got %q", value)
	}
	e[program] = append(e[program], arg)
	return nil
}

// state is what a user of the control plane needs to know.
type state struct {
	Dir        string         `json:"dir"`
	Server     string         `json:"server"`
	Kubeconfig string         `json:"kubeconfig"`
	Supervisor int            `json:"supervisor"`
	Pids       map[string]int `json:"pids"`
}

func main() {
	opts := options{extra: extraArgs{}}
	flag.StringVar(&opts.assets, "assets", "", "directory of etcd, kube-apiserver and, if present, kube-controller-manager and kube-scheduler")
	flag.StringVar(&opts.dir, "dir", "", "directory for certificates, kubeconfigs, data, logs and state.json")
	flag.StringVar(&opts.hold, "hold", "", "run while somebody holds a shared lock on this file")
	flag.DurationVar(&opts.linger, "linger", 0, "with --hold: how long to outlive the last holder")
	flag.BoolVar(&opts.detach, "detach", false, "run until SIGTERM")
	flag.StringVar(&opts.kwok, "kwok", "", "path of kwok: keep nodes annotated kwok.x-k8s.io/node=fake alive")
	flag.BoolVar(&opts.fsync, "fsync", false, "let etcd sync to disk: slower, needed only to survive a machine's crash")
	flag.BoolVar(&opts.remove, "remove", false, "remove the directory at the end, unless a command says to keep it")
	flag.Var(opts.extra, "arg", "extra flag of one program, as PROGRAM=--flag (repeatable)")
	flag.Parse()
	if err := run(opts); err != nil {
		fmt.Fprintln(os.Stderr, "supervise:", err)
		os.Exit(1)
	}
}

func run(opts options) error {
	if opts.assets == "" || opts.dir == "" {
		return errors.New("--assets and --dir are required")
	}
	// The apiserver and etcd resolve relative paths against their own directory.
	for _, path := range []*string{&opts.assets, &opts.dir} {
		absolute, err := filepath.Abs(*path)
		if err != nil {
			return err
		}
		*path = absolute
	}
	stop := make(chan os.Signal, 2)
	signal.Notify(stop, os.Interrupt, syscall.SIGTERM)
	signal.Ignore(syscall.SIGHUP)

	if err := os.MkdirAll(opts.dir, 0o755); err != nil {
		return err
	}
	alive, err := lockFile(filepath.Join(opts.dir, "supervise.lock"))
	if err != nil {
		return err
	}
	defer alive.Close()
	if err := clear(opts.dir); err != nil {
		return err
	}

	// Watched from the start: a harness killed during start-up is noticed too.
	ended := make(chan error, 1)
	commands := make(chan command)
	switch {
	case opts.hold != "":
		go func() { ended <- waitUnheld(opts.hold, opts.linger) }()
	case !opts.detach:
		go func() { ended <- readCommands(os.Stdin, commands) }()
	}

	cluster, err := newCluster(opts)
	if err != nil {
		return err
	}
	defer cluster.stopAll()
	started := make(chan error, 1)
	go func() { started <- cluster.startAll() }()
	// A lone control plane may lose programs on purpose; one that others share must not.
	shared := opts.hold != "" || opts.detach
	for {
		select {
		case <-stop:
			return nil
		case err := <-ended:
			return err
		case err := <-started:
			if err == nil {
				err = cluster.writeState()
			}
			if err == nil && !shared {
				err = json.NewEncoder(os.Stdout).Encode(cluster.state())
			}
			if err != nil {
				return err
			}
			started = nil
		case exit := <-cluster.exits:
			if shared || started != nil {
				return exit
			}
			fmt.Fprintln(os.Stderr, "supervise:", exit)
		case c := <-commands:
			if c.verb == "keep" {
				cluster.opts.remove = false
			}
			c.reply(cluster)
		}
	}
}

// clear removes what an earlier run in the same directory left, except what others
// hold open: the locks, and the file that our messages go to.
func clear(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if strings.HasSuffix(entry.Name(), ".lock") || entry.Name() == "supervise.log" {
			continue
		}
		if err := os.RemoveAll(filepath.Join(dir, entry.Name())); err != nil {
			return err
		}
	}
	return nil
}

// lockFile takes the exclusive lock that says "a supervisor is alive here".
func lockFile(path string) (*os.File, error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	for attempt := 0; ; attempt++ {
		err = syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return file, nil
		}
		// Whoever asks whether we live locks it too, for a moment.
		if attempt == 20 {
			file.Close()
			return nil, fmt.Errorf("another supervisor runs in %s: %w", filepath.Dir(path), err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// waitUnheld returns, with the lock taken exclusively, once nobody has held a
// shared lock on the file for the given time. The lock stays taken until this
// process ends, so that a new holder waits for the end of the tear-down.
func waitUnheld(path string, linger time.Duration) error {
	// Not an os.File: the collector would close it as soon as only its number is used,
	// and everybody's control plane would end in the middle of a test.
	fd, err := syscall.Open(path, syscall.O_CREAT|syscall.O_RDWR|syscall.O_CLOEXEC, 0o644)
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	for {
		if err := flockBlocking(fd, syscall.LOCK_EX); err != nil {
			return fmt.Errorf("wait for the holders of %s: %w", path, err)
		}
		if linger == 0 {
			return nil
		}
		if err := flockBlocking(fd, syscall.LOCK_UN); err != nil {
			return err
		}
		time.Sleep(linger)
		err := syscall.Flock(fd, syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil || !errors.Is(err, syscall.EWOULDBLOCK) {
			return err
		}
	}
}

func flockBlocking(fd, how int) error {
	for {
		// The Go runtime interrupts system calls by signals of its own.
		if err := syscall.Flock(fd, how); !errors.Is(err, syscall.EINTR) {
			return err
		}
	}
}
