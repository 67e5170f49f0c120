//! Hashes as hexadecimal digits.

/// Two digits for each byte.
pub fn encode(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// 32 bytes of 64 digits.
pub fn decode(digits: &str) -> Option<[u8; 32]> {
    if digits.len() != 64 || !digits.is_ascii() {
        return None;
    }
    let mut bytes = [0; 32];
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&digits[2 * i..2 * i + 2], 16).ok()?;
    }
    Some(bytes)
}

/// For `#[serde(with = "..")]`.
pub mod serde {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    /// As digits.
    ///
    /// # Errors
    ///
    /// The serializer's.
    pub fn serialize<S: Serializer>(bytes: &[u8; 32], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&super::encode(bytes))
    }

    /// From digits.
    ///
    /// # Errors
    ///
    /// What is not 64 digits.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<[u8; 32], D::Error> {
        let digits = String::deserialize(deserializer)?;
        super::decode(&digits).ok_or_else(|| D::Error::custom("expected 64 hexadecimal digits"))
    }
}
