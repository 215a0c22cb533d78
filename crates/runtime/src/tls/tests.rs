use testkit::{Authority, Purpose};

use super::*;

fn files(dir: &Path, name: &str) -> CertificateFiles {
    CertificateFiles {
        certificate: dir.join(format!("{name}.crt")),
        key: dir.join(format!("{name}.key")),
    }
}

#[test]
fn changed_files_count_from_then_on_and_bad_ones_do_not() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let authority = Authority::new("test").unwrap();
    let sign = || {
        authority
            .sign(Purpose::Server, "controller", &["localhost"])
            .unwrap()
    };
    sign().write(dir, "server").unwrap();
    let own = files(dir, "server");
    let tls = ServerTls::load(own.clone(), ClientCertificates::None).unwrap();
    let first = tls.config();
    assert!(Arc::ptr_eq(&first, &tls.config()));

    sign().write(dir, "server").unwrap();
    let second = tls.config();
    assert!(!Arc::ptr_eq(&first, &second));

    // A half-written pair, a missing file, an empty file.
    let third = sign();
    fs::write(&own.certificate, &third.certificate).unwrap();
    assert!(Arc::ptr_eq(&second, &tls.config()));
    fs::remove_file(&own.key).unwrap();
    assert!(Arc::ptr_eq(&second, &tls.config()));
    fs::write(&own.key, "").unwrap();
    assert!(Arc::ptr_eq(&second, &tls.config()));
    fs::write(&own.key, &third.key).unwrap();
    assert!(!Arc::ptr_eq(&second, &tls.config()));
}

/// A kubelet updates a mounted `ConfigMap` by replacing a symbolic link to a directory.
#[test]
fn an_authority_that_a_kubelet_mounts_is_followed() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let publish = |version: &str| {
        fs::create_dir(dir.join(version)).unwrap();
        let authority = Authority::new(version).unwrap();
        fs::write(dir.join(version).join("ca.crt"), authority.pem()).unwrap();
        std::os::unix::fs::symlink(version, dir.join("..data_tmp")).unwrap();
        fs::rename(dir.join("..data_tmp"), dir.join("..data")).unwrap();
    };
    publish("..1");
    std::os::unix::fs::symlink("..data/ca.crt", dir.join("ca.crt")).unwrap();
    let tls = ClientTls::load(dir.join("ca.crt"), None).unwrap();
    let first = tls.config();
    assert!(Arc::ptr_eq(&first, &tls.config()));
    publish("..2");
    let second = tls.config();
    assert!(!Arc::ptr_eq(&first, &second));
    assert!(Arc::ptr_eq(&second, &tls.config()));
}

/// Reading may fail once, for lack of descriptors or by an error of the disk, while the files
/// are unchanged.
#[test]
fn files_that_could_not_be_read_once_are_read_again() {
    let answers = Mutex::new(vec![
        Ok(2),
        Err(TlsError::Internal(rustls::Error::DecryptError)),
        Ok(1),
    ]);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "1").unwrap();
    let make = move || answers.lock().unwrap().pop().unwrap();
    let reloading = FilesTls::new(vec![file.clone()], Box::new(make)).unwrap();
    fs::write(&file, "two").unwrap();
    let read = [
        *reloading.config(),
        *reloading.config(),
        *reloading.config(),
    ];
    assert_eq!(read, [1, 2, 2]);
}

#[test]
fn what_is_wrong_with_files_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let authority = Authority::new("test").unwrap();
    let pair = authority.sign(Purpose::Server, "one", &[]).unwrap();
    pair.write(dir, "one").unwrap();
    let other = authority.sign(Purpose::Server, "two", &[]).unwrap();
    other.write(dir, "two").unwrap();
    fs::write(dir.join("empty"), "").unwrap();
    fs::write(dir.join("damaged"), "-----BEGIN CERTIFICATE-----\n?\n").unwrap();
    fs::write(dir.join("large"), vec![b'x'; 1024 * 1024 + 1]).unwrap();
    let mixed = |certificate: &str, key: &str| CertificateFiles {
        certificate: dir.join(certificate),
        key: dir.join(key),
    };
    let table = [
        (mixed("absent", "one.key"), "cannot read"),
        (mixed("empty", "one.key"), "holds no certificate"),
        (mixed("damaged", "one.key"), "damaged certificate"),
        (mixed("large", "one.key"), "at most 1048576"),
        (mixed("one.crt", "empty"), "holds no private key"),
        (mixed("one.crt", "one.crt"), "holds no private key"),
        (mixed("one.crt", "two.key"), "cannot be used with the key"),
    ];
    for (files, expected) in table {
        let error = ServerTls::load(files.clone(), ClientCertificates::None);
        let error = error.err().map(|error| chain(&error)).unwrap_or_default();
        assert!(error.contains(expected), "{files:?}: {error}");
    }
    let clients = ClientCertificates::Required(dir.join("empty"));
    let error = ServerTls::load(files(dir, "one"), clients).err().unwrap();
    assert!(
        error.to_string().contains("empty holds no certificate"),
        "{error}"
    );
    let error = ClientTls::load(dir.join("absent"), None).err().unwrap();
    assert!(error.to_string().contains("cannot read"), "{error}");
}

#[test]
fn a_certificate_names_a_node_in_one_of_two_ways() {
    let authority = Authority::new("test").unwrap();
    let table = [
        ("system:node:gpu-7", &[][..], Some("gpu-7")),
        ("system:node:gpu-7", &["gpu-8"], Some("gpu-7")),
        ("system:node:", &[], None),
        ("gpu-7", &[], None),
        ("anything", &["gpu-7"], Some("gpu-7")),
        ("anything", &["gpu-7", "gpu-7.example"], None),
        ("kubernetes-admin", &[], None),
        ("10.0.0.7", &["10.0.0.7"], None),
    ];
    for (common_name, names, expected) in table {
        let pair = authority.sign(Purpose::Client, common_name, names).unwrap();
        let der = CertificateDer::from_pem_slice(pair.certificate.as_bytes()).unwrap();
        let read = CertificateNames::read(&der);
        assert_eq!(read.node(), expected, "{common_name} {names:?}");
        assert_eq!(read.common_name.as_deref(), Some(common_name));
    }
    assert_eq!(CertificateNames::read(b"no certificate").node(), None);
}

#[test]
fn the_time_of_a_certificate_is_that_of_its_owner() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::new("test").unwrap();
    let pair = authority.sign(Purpose::Server, "one", &[]).unwrap();
    pair.write(dir.path(), "one").unwrap();
    let path = dir.path().join("one.crt");
    let validity = Validity::read(&path).unwrap();
    assert!(validity.from < validity.until, "{validity:?}");
    assert!(validity.whole() > jiff::SignedDuration::from_hours(24));
    fs::write(&path, "").unwrap();
    let error = Validity::read(&path).unwrap_err().to_string();
    assert!(error.contains("holds no certificate"), "{error}");
}
