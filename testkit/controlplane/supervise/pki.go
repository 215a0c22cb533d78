package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"
)

const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: None
  users: [system:apiserver, system:kube-controller-manager, system:kube-scheduler]
- level: Metadata
`

// clients are the identities that get a certificate and a kubeconfig.
var clients = map[string]pkix.Name{
	"admin":              {CommonName: "admin", Organization: []string{"system:masters"}},
	"controller-manager": {CommonName: "system:kube-controller-manager"},
	"scheduler":          {CommonName: "system:kube-scheduler"},
	"front-proxy":        {CommonName: "front-proxy"},
	// All fake kubelets are one identity, which the Node authorizer could not allow.
	"kwok": {CommonName: "kwok", Organization: []string{"system:masters"}},
}

// authority is the certificate authority of one control plane.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

// makePKI writes every key, certificate and kubeconfig, and the audit policy.
func makePKI(dir, server string) (*authority, error) {
	ca, err := newAuthority(dir)
	if err != nil {
		return nil, err
	}
	if err := writeServiceAccountKey(dir); err != nil {
		return nil, err
	}
	serving := &x509.Certificate{
		Subject:     pkix.Name{CommonName: "kube-apiserver"},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames:    []string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1), net.IPv4(10, 0, 0, 1)},
	}
	if err := ca.issue(dir, "apiserver", serving); err != nil {
		return nil, err
	}
	for name, subject := range clients {
		client := &x509.Certificate{Subject: subject, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
		if err := ca.issue(dir, name, client); err != nil {
			return nil, err
		}
		if err := ca.kubeconfig(dir, name, server); err != nil {
			return nil, err
		}
	}
	return ca, os.WriteFile(filepath.Join(dir, "audit.yaml"), []byte(auditPolicy), 0o644)
}

func newAuthority(dir string) (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "gpuwarden test control plane"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(1, 0, 0),
		IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	ca := &authority{cert: cert, key: key, pem: certificatePEM(der)}
	return ca, writeKeyPair(dir, "ca", ca.pem, key)
}

func writeServiceAccountKey(dir string) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	public, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return err
	}
	if err := writeKeyPair(dir, "sa", nil, key); err != nil {
		return err
	}
	text := pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public})
	return os.WriteFile(filepath.Join(dir, "sa.pub"), text, 0o644)
}

// issue completes the template, signs it for a new key and writes both.
func (ca *authority) issue(dir, name string, template *x509.Certificate) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	template.SerialNumber, err = rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		return err
	}
	template.NotBefore, template.NotAfter = ca.cert.NotBefore, ca.cert.NotAfter
	template.KeyUsage = x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, template, ca.cert, key.Public(), ca.key)
	if err != nil {
		return err
	}
	return writeKeyPair(dir, name, certificatePEM(der), key)
}

func certificatePEM(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

func writeKeyPair(dir, name string, certificate []byte, key *ecdsa.PrivateKey) error {
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return err
	}
	if certificate != nil {
		if err := os.WriteFile(filepath.Join(dir, name+".crt"), certificate, 0o644); err != nil {
			return err
		}
	}
	text := pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})
	return os.WriteFile(filepath.Join(dir, name+".key"), text, 0o600)
}

func (ca *authority) kubeconfig(dir, name, server string) error {
	certificate, err := os.ReadFile(filepath.Join(dir, name+".crt"))
	if err != nil {
		return err
	}
	key, err := os.ReadFile(filepath.Join(dir, name+".key"))
	if err != nil {
		return err
	}
	base64 := base64.StdEncoding.EncodeToString
	text := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: testkit, cluster: {server: %q, certificate-authority-data: %s}}]
users: [{name: %[3]s, user: {client-certificate-data: %[4]s, client-key-data: %[5]s}}]
contexts: [{name: testkit, context: {cluster: testkit, user: %[3]s}}]
current-context: testkit
`, server, base64(ca.pem), name, base64(certificate), base64(key))
	return os.WriteFile(filepath.Join(dir, name+".kubeconfig"), []byte(text), 0o600)
}

func loadKeyPair(dir, name string) (*tls.Certificate, error) {
	pair, err := tls.LoadX509KeyPair(filepath.Join(dir, name+".crt"), filepath.Join(dir, name+".key"))
	return &pair, err
}

// waitFor asks until the answer is 200, as the given client or as nobody.
func (ca *authority) waitFor(server, path string, as *tls.Certificate, limit time.Duration) error {
	roots := x509.NewCertPool()
	roots.AddCert(ca.cert)
	config := &tls.Config{RootCAs: roots}
	if as != nil {
		config.Certificates = []tls.Certificate{*as}
	}
	client := &http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{TLSClientConfig: config}}
	var last error
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		response, err := client.Get(server + path)
		if err != nil {
			last = err
			continue
		}
		response.Body.Close()
		if response.StatusCode == http.StatusOK {
			return nil
		}
		last = fmt.Errorf("GET %s: %s", path, response.Status)
	}
	return fmt.Errorf("not ready after %s: %w", limit, last)
}
