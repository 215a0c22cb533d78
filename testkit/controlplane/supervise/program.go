package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
)

// program is one child process and how to start it, any number of times.
type program struct {
	name, path, log string
	args            []string

	mu      sync.Mutex
	process *os.Process
	done    chan struct{} // closed when the process has ended
	killed  bool
}

// start runs the program; exits hears of its end unless that was our doing.
func (p *program) start(exits chan<- error) error {
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(p.path, p.args...)
	cmd.Stdout, cmd.Stderr = log, log
	// Less collection of garbage for more memory: several of these start at once on few cores.
	cmd.Env = append(os.Environ(), "GOGC=400")
	// Children die with us, even when we are killed ourselves. The kernel ties
	// that to the thread that starts them: it must not end before we do.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := startOnLastingThread(cmd); err != nil {
		return fmt.Errorf("start %s: %w", p.name, err)
	}
	done := make(chan struct{})
	p.mu.Lock()
	p.process, p.done, p.killed = cmd.Process, done, false
	p.mu.Unlock()
	go func() {
		err := cmd.Wait()
		p.mu.Lock()
		wanted := p.killed
		p.process = nil
		p.mu.Unlock()
		close(done)
		if !wanted {
			exits <- fmt.Errorf("%s ended by itself (%v)%s", p.name, err, p.lastWords())
		}
	}()
	return nil
}

// lastWords quotes the end of the log for an error: the file may be gone when it is read.
func (p *program) lastWords() string {
	const lines = 8
	text, err := os.ReadFile(p.log)
	if err != nil {
		return ""
	}
	all := strings.Split(strings.TrimSpace(string(text)), "\n")
	return fmt.Sprintf("; end of %s:\n%s", p.log, strings.Join(all[max(0, len(all)-lines):], "\n"))
}

func (p *program) running() bool { return p.pid() != 0 }

func (p *program) pid() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.process == nil {
		return 0
	}
	return p.process.Pid
}

// kill ends the process and returns when it is gone; one that does not run is fine.
func (p *program) kill() error {
	p.mu.Lock()
	process, done := p.process, p.done
	p.killed = true
	p.mu.Unlock()
	if process == nil {
		return nil
	}
	if err := process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	<-done
	return nil
}

// freeze returns when every thread has stopped: on a busy machine the first of them
// may have to wait for a processor before it can take the signal, and the others work on.
func (p *program) freeze() error {
	if err := p.signal(syscall.SIGSTOP); err != nil {
		return err
	}
	pid := p.pid()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if stopped(pid) {
			return nil
		}
	}
	return fmt.Errorf("%s does not stop", p.name)
}

// stopped reads the state of all threads.
func stopped(pid int) bool {
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	for _, file := range files {
		text, err := os.ReadFile(file)
		// The state follows the name, which stands in parentheses.
		_, state, _ := strings.Cut(string(text), ") ")
		if err == nil && !strings.HasPrefix(state, "T") {
			return false
		}
	}
	return err == nil && len(files) > 0
}

func (p *program) thaw() error { return p.signal(syscall.SIGCONT) }

func (p *program) signal(signal syscall.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.process == nil {
		return fmt.Errorf("%s does not run", p.name)
	}
	return p.process.Signal(signal)
}

// starter runs on a thread of its own that lives as long as the process.
var starter = func() chan func() {
	work := make(chan func())
	go func() {
		runtime.LockOSThread()
		for f := range work {
			f()
		}
	}()
	return work
}()

func startOnLastingThread(cmd *exec.Cmd) error {
	result := make(chan error)
	starter <- func() { result <- cmd.Start() }
	return <-result
}
