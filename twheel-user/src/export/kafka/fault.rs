//! What went wrong with Kafka, in a sentence that says what to do.

use std::{fmt, io};

use rdkafka::{error::KafkaError, types::RDKafkaErrorCode as Code};

/// What a sentence names.
pub(super) struct Named {
    pub brokers: String,
    pub topic: String,
    pub user: Option<String>,
}

impl Named {
    /// What an error of librdkafka or of a broker means. `said`: its own words; may be empty.
    pub fn fault(&self, code: Code, said: &str) -> io::Error {
        let Self {
            brokers,
            topic,
            user,
        } = self;
        let why = match short(said) {
            "" => code.to_string(),
            said => said.to_owned(),
        };
        let user = user.as_deref().unwrap_or("(none)");
        let message = match code {
            Code::Authentication
            | Code::SaslAuthenticationFailed
            | Code::UnsupportedSASLMechanism
            | Code::IllegalSASLState => format!(
                "the Kafka brokers at {brokers} refuse the user {user}: {why}: give --user, \
                 --password-file and --sasl-mechanism as the brokers have them"
            ),
            Code::SSL => format!(
                "TLS with the Kafka brokers at {brokers} failed: {why}: give the authority of their \
                 certificates with --ca, and the port where they take TLS"
            ),
            Code::UnknownTopic | Code::UnknownTopicOrPartition | Code::UnknownPartition => {
                return self.no_topic();
            }
            Code::TopicAuthorizationFailed | Code::ClusterAuthorizationFailed => format!(
                "the Kafka brokers at {brokers} do not let the user {user} write to the topic {topic}: \
                 grant it: kafka-acls.sh --add --allow-principal User:{user} --producer --topic {topic}"
            ),
            Code::DuplicateSequenceNumber => format!(
                "the Kafka brokers at {brokers} take what is sent to {topic} for something that they \
                 have, and do not say where it stands"
            ),
            Code::MessageSizeTooLarge | Code::InvalidMessageSize => format!(
                "the Kafka topic {topic} does not take batches of this size: raise its \
                 max.message.bytes, or give a smaller one with --set batch.size=BYTES"
            ),
            Code::AllBrokersDown
            | Code::BrokerTransportFailure
            | Code::Resolve
            | Code::OperationTimedOut
            | Code::RequestTimedOut
            | Code::TimedOutQueue => format!(
                "cannot reach a Kafka broker at {brokers}: {why}: check that one runs there, and \
                 whether it wants --tls or --sasl-mechanism"
            ),
            _ => format!("the Kafka brokers at {brokers} refuse what is sent to {topic}: {why}"),
        };
        io::Error::other(message)
    }

    /// The topic is not there.
    pub fn no_topic(&self) -> io::Error {
        let Self { brokers, topic, .. } = self;
        io::Error::other(format!(
            "the Kafka brokers at {brokers} have no topic {topic}, and twheel creates none: create it: \
             kafka-topics.sh --create --topic {topic} --partitions 12"
        ))
    }

    /// The brokers have acknowledged nothing for so many seconds.
    pub fn silent(&self, seconds: u64) -> io::Error {
        let Self { brokers, topic, .. } = self;
        io::Error::other(format!(
            "the Kafka brokers at {brokers} have acknowledged nothing for {seconds} s: check them, and \
             that the topic {topic} has enough replicas in sync"
        ))
    }

    /// There is no producer with these settings.
    pub fn unusable(&self, error: &KafkaError) -> io::Error {
        let why: &dyn fmt::Display = match error {
            KafkaError::ClientCreation(why) => why,
            error => error,
        };
        io::Error::other(format!(
            "cannot send to the Kafka brokers at {}: {why}: check --ca, --cert, --key and --set",
            self.brokers
        ))
    }
}

/// How much an error says: that a broker was not reached follows from others.
pub(super) fn weight(code: Code) -> u8 {
    match code {
        Code::AllBrokersDown => 0,
        Code::BrokerTransportFailure | Code::OperationTimedOut => 1,
        Code::Resolve => 2,
        _ => 3,
    }
}

/// The words without what librdkafka adds for its developers.
fn short(said: &str) -> &str {
    let end = said.find(" (after ").unwrap_or(said.len());
    let said = &said[..end];
    // `sasl_ssl://host:9092/bootstrap: `, or `host:9092/1: ` with the number of a broker.
    let said = match said.split_once(": ") {
        Some((broker, rest)) if is_broker(broker) => rest,
        _ => said,
    };
    said.trim().trim_end_matches(['.', ':'])
}

/// Whether this is librdkafka's name of a broker: its address, and its number if that is known.
fn is_broker(text: &str) -> bool {
    let Some((address, number)) = text.rsplit_once('/') else {
        return false;
    };
    let is_number = |it: &str| !it.is_empty() && it.bytes().all(|byte| byte.is_ascii_digit());
    let port = address.rsplit_once(':').map(|(_, port)| port);
    port.is_some_and(is_number) && (number == "bootstrap" || is_number(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_says_what_to_do() {
        let named = Named {
            brokers: "k:9092".to_owned(),
            topic: "t".to_owned(),
            user: Some("u".to_owned()),
        };
        for (code, said, wanted) in [
            (
                Code::BrokerTransportFailure,
                "k:9092/bootstrap: Connect to ipv4#127.0.0.1:1 failed: Connection refused (after 0ms in state CONNECT)",
                "k:9092: Connect to ipv4#127.0.0.1:1 failed: Connection refused: check that one runs there",
            ),
            (
                Code::AllBrokersDown,
                "k:9092/7: Connect to ipv4#127.0.0.1:1 failed: Connection refused (after 0ms in state CONNECT)",
                "k:9092: Connect to ipv4#127.0.0.1:1 failed: Connection refused: check that one runs there",
            ),
            (
                Code::Authentication,
                "sasl_plaintext://k:9092/bootstrap: SASL authentication error: no (after 1ms in state AUTH)",
                "refuse the user u: SASL authentication error: no: give --user",
            ),
            (Code::SSL, "certificate verify failed", "--ca"),
            (
                Code::UnknownTopicOrPartition,
                "",
                "kafka-topics.sh --create --topic t",
            ),
            (Code::TopicAuthorizationFailed, "", "kafka-acls.sh"),
            (Code::MessageSizeTooLarge, "", "max.message.bytes"),
            (Code::PolicyViolation, "", "refuse what is sent to t"),
        ] {
            let message = named.fault(code, said).to_string();
            assert!(message.contains(wanted), "{code:?}: {message}");
            assert!(!message.contains("after "), "{message}");
        }
    }
}
