//! Functions of templates: Go's with bounded results, and `quote` of NVSentinel's lifecycle manager.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use gotmpl::{Template as GoTemplate, TemplateError as GoError, Value};
use serde_json::Value as Json;

/// Most bytes that all function calls of one rendering may produce together.
const MAX_MADE_BYTES: usize = 1024 * 1024;
/// Functions that a template may call.
pub(super) const FUNCTIONS: [&str; 14] = [
    "and", "eq", "ge", "gt", "index", "le", "len", "lt", "ne", "not", "or", "print", "printf",
    "quote",
];

/// Adds the functions whose results can grow, with a common limit on all results.
pub(super) fn with_functions(template: GoTemplate) -> GoTemplate {
    let made = Arc::new(AtomicUsize::new(0));
    let bounded = move |text: String| {
        let before = made.fetch_add(text.len(), Ordering::Relaxed);
        if before + text.len() > MAX_MADE_BYTES {
            let what = format!("its functions produce more than {MAX_MADE_BYTES} bytes");
            return Err(GoError::Exec(what));
        }
        Ok(Value::String(text.into()))
    };
    let (also, quoted) = (bounded.clone(), bounded.clone());
    template
        .func("print", move |args| bounded(print(args)))
        .func("printf", move |args| also(printf(args)?))
        .func("quote", move |args| {
            let texts: Vec<String> = args.iter().map(|one| quote(&one.to_string())).collect();
            quoted(texts.join(" "))
        })
}

/// Prints values like Go's `print`: two adjacent values that are not texts are separated by a space.
fn print(args: &[Value]) -> String {
    let mut text = String::new();
    let mut before = true;
    for (index, arg) in args.iter().enumerate() {
        let is_text = matches!(arg, Value::String(_));
        if index > 0 && !is_text && !before {
            text.push(' ');
        }
        text.push_str(&arg.to_string());
        before = is_text;
    }
    text
}

/// Prints values like Go's `printf`, with the verbs `%s`, `%v`, `%d`, `%t`, `%q` and `%%`.
fn printf(args: &[Value]) -> Result<String, GoError> {
    let wrong = |what: String| GoError::Exec(format!("printf: {what}"));
    let Some((Value::String(format), rest)) = args.split_first() else {
        return Err(wrong("its first argument is not a text".to_owned()));
    };
    let mut rest = rest.iter();
    let mut text = String::new();
    let mut chars = format.chars();
    while let Some(one) = chars.next() {
        if one != '%' {
            text.push(one);
            continue;
        }
        let verb = chars.next();
        if verb == Some('%') {
            text.push('%');
            continue;
        }
        let verb = verb.filter(|verb| "svdtq".contains(*verb));
        let Some(verb) = verb else {
            let what = "only %s, %v, %d, %t, %q and %% are supported";
            return Err(wrong(what.to_owned()));
        };
        let Some(value) = rest.next() else {
            return Err(wrong(format!("%{verb} has no argument")));
        };
        let fits = match verb {
            'd' => matches!(value, Value::Int(_) | Value::Uint(_)),
            't' => matches!(value, Value::Bool(_)),
            'q' => matches!(value, Value::String(_)),
            _ => true,
        };
        if !fits {
            return Err(wrong(format!("%{verb} does not fit {value}")));
        }
        match verb {
            'q' => text.push_str(&quote(&value.to_string())),
            _ => text.push_str(&value.to_string()),
        }
    }
    if rest.next().is_some() {
        return Err(wrong("it has more arguments than verbs".to_owned()));
    }
    Ok(text)
}

/// Quotes a text such that it is valid in YAML and JSON.
fn quote(text: &str) -> String {
    Json::from(text).to_string()
}
